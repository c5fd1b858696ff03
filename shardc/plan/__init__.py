"""What a user writes about a model that they do not own: the pydantic schema of a plan, and Hugging Face's own plans.

May import `ir`, `schedule` and `kernels_triton` (for the names they define). Newcomers start at `schema.py`.
"""
