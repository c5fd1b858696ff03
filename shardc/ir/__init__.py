"""The vocabulary: meshes, placements, typed graphs, programs, diagnostics. It imports `kernels_triton.base`."""
