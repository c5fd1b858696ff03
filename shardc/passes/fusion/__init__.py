"""Fusion: chains of pointwise ops, casts and reductions become kernels.

May import `ir`, `rules`, `cost`, `passes.base` and `kernels_triton`. Newcomers start at `fuse.py`, the pass, which
names the phases in their order: `analysis`, `lowering`, `clustering`, `emit`.
"""
