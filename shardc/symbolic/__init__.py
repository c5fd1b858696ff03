"""Symbolic sizes: what a program costs as formulas of named extents, and one program for batches of other sizes."""
