"""Clients that leave their GPUs, and come back there or elsewhere."""
