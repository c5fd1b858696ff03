"""Why a collective, a transfer or a kernel exists, what it costs, and which change of the plan would remove it.

May import everything but `api` and `cli`. Newcomers start at `collective.py`.
"""
