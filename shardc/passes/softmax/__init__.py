"""Softmax over a sharded dim: taken apart where that sends less, then merged into one meeting of the group.

May import `ir`, `rules` and `passes.base`. Newcomers start at `split_softmax.py`.
"""
