"""Parts that several benchmarks share: a coordinator and programs under the hook, worker groups, a scripted client.

Non-goals: what one benchmark measures.
"""
