"""The pass pipeline, and what binds a plan to a traced model: patterns to tensors, options to passes.

May import everything but `explain`, `api` and `cli`. Newcomers start at `pass_pipeline.py`, which lists every pass.
"""
