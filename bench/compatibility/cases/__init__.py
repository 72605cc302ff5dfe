"""Small deterministic programs, one a framework or feature: what the compatibility matrix is made of.

May not go here: anything of nvshare.
"""
