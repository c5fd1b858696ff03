"""The trainer: steps of a program, simulated or as this rank of a job, and the loop around them.

May import the other packages of `runtime`. Newcomers start at `trainer.py`, then `loop.py`.
"""
