"""Programs that people share a card with, whole and of gigabytes: model servers, image generators, notebooks, training.

Each module has `CASES` and `versions()` as those of `cases/`.  How much memory a program takes: `size_bytes()` of
`cases/program.py`.

Non-goals: anything of nvshare; weights from elsewhere.
"""
