"""The NRI plugin: slots for containers that another engine has placed on a part of a GPU.

`nvshare-nri` (plugin_main.py) connects to the container runtime, which asks about each container before it starts.
"""
