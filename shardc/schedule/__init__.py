"""Pipeline schedules as data: instruction lists, built-in schedules, their proof, their timeline.

May import `ir` alone. Newcomers start at `instructions.py`, then `schedules/registry.py`.
"""
