"""The kernel language: a kernel as data, its op table, its text form, and its reference in plain torch.

May import nothing else of `kernels_triton`. Newcomers start at `kernel.py`.
"""
