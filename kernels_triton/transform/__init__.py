"""Rewrites of kernels: other dims, fewer instructions, unrolled parts, split outputs. Each maps a kernel to a kernel.

May import `kernels_triton.ir`. Newcomers start at `simplify.py`.
"""
