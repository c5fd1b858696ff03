"""Triton kernels for the fused nodes of a compiled program: templates, a generator, and their references.

It stands alone: a kernel never sees a mesh, a plan or a process group, and nothing of `shardc` is imported.
"""
