"""How attention runs whose sequence lies over axes.

May import `ir`, `rules` and `passes.base`. Newcomers start at `divide_attention.py`.
"""
