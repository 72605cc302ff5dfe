"""Files that a system needs beside the programs: service units, a sample configuration, manual pages, shell completion.

`nvshare-ctl install-unit` and `nvshare-ctl man` print them; nothing is written.
"""
