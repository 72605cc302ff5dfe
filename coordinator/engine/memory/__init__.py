"""Plans of GPU memory: what is evicted, restored, prefetched and admitted, and how much host memory backs it.

In: the model and the order of clients to come.  Out: targets of resident memory, answers to questions, the cost of
switches.
Non-goals: who runs (engine, policies); the moves themselves (the hook).
"""
