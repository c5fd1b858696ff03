"""Broadcast stores: a stored value is marked as varying along every dim that its output varies along.

    y = -s       f32[8, 64] of a scalar      512 elements are written, one number is computed

The dims that a value varies along decide where the generated code computes it (once, for each row, or for each element)
and which masks it needs. A store over more dims stores a `spread` value instead. `spread` computes nothing, and its
store is written where the output's elements are.
"""

from __future__ import annotations

from dataclasses import replace

from kernels_triton.ir.kernel import Kernel, KernelStep, OutputStore, Ref


def broadcast_stores(kernel: Kernel) -> Kernel:
    """The kernel in which every stored value varies along all dims of its output's access map."""
    steps, ref_of = list(kernel.steps), dict[KernelStep, Ref]()

    def stored(store: OutputStore) -> OutputStore:
        strides = store.access_map.strides
        if kernel.varies[store.value.index] == tuple(s != 0 for s in strides):
            return store
        step = KernelStep("spread", (store.value,), strides)
        if step not in ref_of:
            ref_of[step] = Ref(len(kernel.inputs) + len(steps))
            steps.append(step)
        return replace(store, value=ref_of[step])

    outputs = tuple(replace(output, stores=tuple(map(stored, output.stores))) for output in kernel.outputs)
    return replace(kernel, steps=tuple(steps), outputs=outputs) if ref_of else kernel
