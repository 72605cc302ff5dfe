"""Thousands of jobs under the real core and the real policies in virtual time: `python -m nvshare.bench.simulate`."""
