"""What is stored over more of the space than it varies along, said to vary there.

    y = -s       f32[8, 64] of a scalar      each of 512 places is written, and only one number computed

Where in a kernel's text a value is computed, once, in each row or in each element, and what masks it needs, goes by
what it varies along. A store that goes further is of a `spread` value: nothing is computed for it, and it is written
where its output lies.
"""

from __future__ import annotations

from dataclasses import replace

from kernels_triton.fused.kernel import Kernel, Ref, Step, Store


def spread(kernel: Kernel) -> Kernel:
    """The kernel, each store of which is of a value that varies along every dim that its output is walked along."""
    steps, known = list(kernel.steps), dict[Step, Ref]()

    def stored(store: Store) -> Store:
        strides = store.walk.strides
        if kernel.varies[store.value.index] == tuple(s != 0 for s in strides):
            return store
        step = Step("spread", (store.value,), strides)
        if step not in known:
            known[step] = Ref(len(kernel.inputs) + len(steps))
            steps.append(step)
        return replace(store, value=known[step])

    outputs = tuple(replace(made, stores=tuple(map(stored, made.stores))) for made in kernel.outputs)
    return replace(kernel, steps=tuple(steps), outputs=outputs) if known else kernel
