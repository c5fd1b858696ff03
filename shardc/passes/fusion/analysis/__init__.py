"""Facts about single values: iteration spaces, views, constants, bytes moved.

May import `ir` and `kernels_triton`. Newcomers start at `iteration_space.py`.
"""
