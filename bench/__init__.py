"""Benchmarks, one question a module.  `python -m nvshare.bench.NAME --help` says what it measures."""
