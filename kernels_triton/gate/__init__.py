"""The compile gate, its corpora, and the tuning of schedules. Programs do not import this package.

May import everything else of `kernels_triton`. Newcomers start at `gate.py`.
"""
