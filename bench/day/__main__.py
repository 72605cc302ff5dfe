"""Runs the benchmark as `python -m nvshare.bench.day`."""

import sys

from nvshare.bench.day.run import main

sys.exit(main())
