"""Generated kernels: the op `shardc::fused(inputs, text)`, its launcher, and the prepared calls of programs.

May import `kernels_triton.codegen` and what that may. Newcomers start at `op.py`, then `launcher.py`.
"""
