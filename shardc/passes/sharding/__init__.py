"""From annotations to a per-rank body: atoms, propagation, partial sums, reshards, collectives, local shapes.

May import `ir`, `rules` and `passes.base`. Newcomers start at `atomize.py`; `compiler/pass_pipeline.py` gives the
order.
"""
