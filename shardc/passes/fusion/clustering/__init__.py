"""Which calls become one kernel: legality, profitability, the order of merges.

May import `fusion.lowering`. Newcomers start at `clustering.py`.
"""
