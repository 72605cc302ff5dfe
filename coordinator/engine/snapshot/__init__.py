"""Read-only pictures of the core, for metrics, `nvshare-ctl` and tests.

Nobody changes a picture, so it may leave the thread that made it.  Fields keep their names when `nvshare-ctl --json`
lays the records flat; no two records of one picture share a name.
"""
