"""The Triton sources. Import them only if Triton is installed (`kernels_triton.launch.launch.HAS_TRITON`), as `ops`
does.
"""
