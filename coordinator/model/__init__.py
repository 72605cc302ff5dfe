"""Records and vocabulary of the core: node, GPUs, clients, seats, events, commands, settings.

In: nothing.  Out: data that the engine, gangs and memory change; each record names the module that changes it.
Non-goals: decisions, clocks, input and output.
"""
