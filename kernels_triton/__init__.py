"""Triton kernels for the fused nodes of a compiled program: templates, a generator, and their references.

A kernel is written against the IR alone (`shardc.ir`) and never sees a mesh, a plan or a process group.
"""

import shardc.ir.ops.library  # noqa: F401  # pyright: ignore[reportUnusedImport]  # first: shardc imports us
