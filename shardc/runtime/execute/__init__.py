"""Running programs on a rank: prepared code, executors, process groups, the hang monitor.

May import `ir`, `schedule`, `partition` and `kernels_triton`. Newcomers start at `executor.py`.
"""
