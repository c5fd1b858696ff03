"""The generator: any connected set of pointwise ops, casts, broadcasts and reductions as one kernel.

`kernel` is the data, `text` its one-line form, `table` the ops it may use, `reference` what it computes (plain torch),
`op` the library op `shardc::fused(inputs, text)` that graphs hold; `codegen` writes the Triton source and `launcher`
runs it. Nothing here imports Triton before a kernel is to run on it.
"""

import shardc.ir.ops.library  # noqa: F401  # pyright: ignore[reportUnusedImport]  # first: shardc imports us
