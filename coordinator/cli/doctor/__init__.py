"""`nvshare-ctl doctor`: examines machine, coordinator and one program, and says what to do.

In: facts, gathered at the edge (gather.py).  Out: findings (checks.py, pure), printed by command.py.
"""
