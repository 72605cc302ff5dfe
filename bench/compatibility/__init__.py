"""Frameworks under the hook, unchanged: `python -m nvshare.bench.compatibility --json`.

In: cases of frameworks (`cases/`).  Out: a verdict a case, and the page `docs/reference/compatibility.md`.
"""
