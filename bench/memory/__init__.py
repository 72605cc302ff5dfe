"""Benchmarks of memory mode `swap`: moves, allocation, residence, host memory made ready, more memory than the card."""
