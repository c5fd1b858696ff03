"""All ranks simulated in one process, and the comparison with the single device and with eager PyTorch.

May import `runtime.execute` and what that may, and `frontend`. Newcomers start at `simulate.py`, then
`verification.py`.
"""
