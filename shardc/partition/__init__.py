"""A step's graph cut into pipeline stages, and what each rank then stores, computes and sends.

May import `ir`, `rules`, `cost`, `schedule` and `passes`. Newcomers start at `cut.py`.
"""
