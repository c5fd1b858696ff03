"""What each op is to a kernel: one function an op.

May import `fusion.analysis`. Newcomers start at `lowered_op.py`, then `common.py`.
"""
