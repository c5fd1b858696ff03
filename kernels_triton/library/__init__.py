"""Hand-written kernels, and the plain-torch reference of each. `kernels_triton.ops` has the functions that launch them.

May import `kernels_triton.launch`. Newcomers start at `kernels/norm.py` beside `reference/norm.py`.
"""
