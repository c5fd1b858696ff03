"""Checkpoints: folders, manifests, locks, resharding on load, export of weights.

May import `runtime.execute` and `ir`. Newcomers start at `checkpoint.py`.
"""
