"""From an unmodified `nn.Module` to a typed joint graph: tracing, precision, gradients and the optimizer's update.

May import `ir`, `rules`, `passes` (decompositions) and `plan`. Newcomers start at `trace.py`, then `ingest.py`.
"""
