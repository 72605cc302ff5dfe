"""Runs the simulator as `python -m nvshare.bench.simulate`."""

import sys

from nvshare.bench.simulate.run import main

sys.exit(main())
