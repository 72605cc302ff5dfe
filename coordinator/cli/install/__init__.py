"""What a system needs beside the programs: service units, a CDI specification for containers, a sample configuration,
manual pages, shell completion.

Only `nvshare-ctl install cdi` writes; the other commands print.
"""
