"""Recomputation: which activations are kept and which are computed again in backward, by a minimum cut.

May import `ir`, `cost` and `passes.base`. Newcomers start at `recompute.py`.
"""
