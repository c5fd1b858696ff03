"""Fewer and larger collectives, and the annotation that each one comes from.

May import `ir`, `rules`, `cost` and `passes.sharding`. Newcomers start at `combine.py`.
"""
