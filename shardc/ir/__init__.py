"""The vocabulary: meshes, placements, typed graphs, programs, diagnostics. Everything else imports this; it imports nothing of ours."""
