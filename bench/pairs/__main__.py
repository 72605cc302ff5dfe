"""Runs the benchmark as `python -m nvshare.bench.pairs`."""

import sys

from nvshare.bench.pairs.run import main

sys.exit(main())
