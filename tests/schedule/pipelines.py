"""Cut models that are not chains, as the graph part will hand them over."""

from shardc.schedule.pipeline import Pipeline, Stage, StagePart, chain_pipeline


def plain(stages: int) -> Pipeline:
    return chain_pipeline(stages, crossing=8, kept=32)


def tied(stages: int) -> Pipeline:
    """A language model: the first and the last stage share a weight, and the gradients' norm is clipped."""
    return chain_pipeline(stages, crossing=8, kept=32, tied=True, clips=True)


def sharded(stages: int) -> Pipeline:
    """ZeRO-3: parameters are gathered before use; no update, gradients are what is wanted."""
    pipeline = chain_pipeline(stages, gathers=True)
    return Pipeline(pipeline.stages, pipeline.bytes, updates=False)


def skipping(stages: int) -> Pipeline:
    """A U-Net with a mask: stage s reads what stage s - 2 made, and every stage reads stage 0's mask."""
    made: list[Stage] = []
    for s in range(stages):
        first, last = s == 0, s == stages - 1
        skip = (f"x{s - 1}",) if s >= 2 else ()  # made by s - 2
        mask = () if first else ("mask",)
        forward = StagePart(
            (f"x{s}", *skip, *mask),
            (() if last else (f"x{s + 1}",)) + (f"kept{s}",) + (("mask",) if first and not last else ()),
            (),
            ("loss",) if last else (),
        )
        given = () if last else (f"dx{s + 1}",)
        # The gradient that comes back over the skip connection: stage s + 2 makes it for what s made.
        given += (f"dskip{s + 1}",) if s + 2 < stages else ()
        dgrad = StagePart(
            (*given, f"kept{s}"),
            (() if first else (f"dx{s}",)) + ((f"dskip{s - 1}",) if s >= 2 else ()) + (f"dkept{s}",),
        )
        made.append(Stage(forward, dgrad, StagePart((f"kept{s}", f"dkept{s}", *given), (), (f"grads{s}",))))
    return Pipeline(tuple(made), {f"x{s}": 4 * s for s in range(stages)} | {"mask": 1})


PIPELINES = {"plain": plain, "tied": tied, "sharded": sharded, "skipping": skipping}
