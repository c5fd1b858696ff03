"""The vocabulary: meshes, placements, typed graphs, programs, diagnostics. Everything imports it; it imports nothing."""
