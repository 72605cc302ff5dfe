"""A workstation's day on one card, by ways of sharing it: `python -m nvshare.bench.day`."""
