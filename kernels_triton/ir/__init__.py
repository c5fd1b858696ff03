"""The kernel language: a kernel as data, its op table, its text form, and its reference in plain torch.

May import `kernels_triton.base`. Newcomers start at `kernel.py`.
"""
