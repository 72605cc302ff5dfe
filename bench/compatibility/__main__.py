"""Runs the benchmark as `python -m nvshare.bench.compatibility`."""

import sys

from nvshare.bench.compatibility.run import main

sys.exit(main())
