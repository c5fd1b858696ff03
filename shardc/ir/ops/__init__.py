"""Ops of the `shardc::` library: what a graph keeps whole that ATen would take apart, and what ATen lacks.

One file a family; importing it registers its ops. `kernels_triton.base.library` says how an op is added.
"""
