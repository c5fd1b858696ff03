"""The vocabulary: meshes, placements, typed graphs, programs, diagnostics. It imports nothing else of ours."""
