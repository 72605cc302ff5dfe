"""Serves over HTTP: the port of the metrics, with TLS.

In: collectors of metrics, a mounted certificate.  Out: answers to scrapes and probes.
Non-goals: what the metrics are.
"""
