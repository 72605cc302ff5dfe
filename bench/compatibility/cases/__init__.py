"""Small deterministic programs, one a framework or feature: what the compatibility matrix is made of.

Non-goals: anything of nvshare.
"""
