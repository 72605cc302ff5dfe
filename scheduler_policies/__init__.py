"""Scheduling policies: the interface (api), their names (registry), and one policy in each file."""
