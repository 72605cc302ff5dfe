"""What a system needs beside the programs: service units, a CDI specification for containers, a sample configuration.

Only `nvshare-ctl install cdi` writes; the other command prints.
"""
