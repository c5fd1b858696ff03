"""Few core ops: what depends on a global extent is rewritten, by a table of decompositions.

May import `ir`, `rules` and `passes.base`. Newcomers start at `normalize.py`.
"""
