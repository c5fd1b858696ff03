"""The Triton sources. Import them only where Triton is (`kernels_triton.launch.HAS_TRITON`); `ops` does."""
