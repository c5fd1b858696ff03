"""From a kernel and a schedule to Triton source.

May import `kernels_triton.ir`, `.transform` and `.launch`. Newcomers start at `codegen.py`.
"""
