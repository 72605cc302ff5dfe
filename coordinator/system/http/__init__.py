"""Serves over HTTP: the port of the metrics, and certificates that are renewed while they are served.

In: collectors of metrics, mounted secrets.  Out: answers to scrapes and probes.
Non-goals: what the metrics are.
"""
