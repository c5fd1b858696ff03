"""The compiler's diagnostic codes, and helpers for messages. Diagnostics and `ShardcError` are those of kernels too."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable
from dataclasses import replace

from kernels_triton.base.diagnostic import CODES, Code, Diagnostic, Severity, ShardcError, error

__all__ = [
    "CODES",
    "Code",
    "Diagnostic",
    "Severity",
    "ShardcError",
    "did_you_mean",
    "error",
    "listed",
    "merged",
    "nearest",
    "suggest",
]
LISTED = 16  # names in a hint, where there is a choice of many

# SC1xx tracing and the model; SC2xx placements and plans; SC3xx rules and ops; SC4xx files; SC5xx runtime.
COMPILER_CODES: dict[str, Code] = {
    "SC101": Code("data-dependent", "the model's control flow or shapes depend on the values of tensors"),
    "SC102": Code("no-scalar-loss", "the model, or the loss given, does not yield one scalar to differentiate"),
    "SC103": Code("bad-batch", "the sample batch does not fit the signature of the model's forward"),
    "SC104": Code("trace-failed", "the model raised an error while it was traced on fake tensors"),
    "SC105": Code("bad-target", "a command's TARGET names no file, factory or configuration that can be loaded"),
    "SC106": Code("no-collective", "a value to explain is no collective of the program"),
    "SC107": Code("optimizer", "an optimizer's update cannot be made part of the program"),
    "SC108": Code("no-gradient", "a trainable parameter gets no gradient from the loss"),
    "SC109": Code("carried-state", "forward keeps a value in Python from step to step, which a compiled step cannot"),
    "SC110": Code("no-module", "what is to be compiled is no nn.Module"),
    "SC111": Code(
        "drawn-number", "forward draws numbers by Python, or by a seed of its own, which no program draws anew"
    ),
    "SC112": Code("unfit-tensor", "a tensor of the model has no shape yet, no elements, or no plain memory"),
    "SC113": Code("loop-unrolled", "a loop over time is traced step by step, since its body is no step of a scan"),
    "SC120": Code("frozen-state", "a tensor of the model would become a constant of the program"),
    "SC121": Code("shared-memory", "two tensors of the model lie in the same memory, and a step changes one of them"),
    "SC122": Code("gradient-hook", "a hook on a parameter acts in a way that a program cannot"),
    "SC123": Code("buffer-form", "forward removes a buffer, or changes its shape or dtype"),
    "SC124": Code("model-changed", "the model was changed since it was compiled: its modes, or what is trained"),
    "SC125": Code("overlapping-inputs", "inputs of a batch lie in the same memory, and forward changes one in place"),
    "SC126": Code("input-written", "forward changes an input in place; a program leaves the caller's tensor as it is"),
    "SC127": Code("nothing-returned", "the model returns no tensor, so there is nothing to evaluate"),
    "SC128": Code(
        "value-assumed", "the program holds for batches that answer a question of forward as the sample does"
    ),
    "SC129": Code("experts-masked", "experts of a loop compute all tokens, not only those that are routed to them"),
    "SC131": Code("dropped-gradients", "a layer that is dropped at random has gradients of zero in that step"),
    "SC201": Code("unknown-axis", "a placement names an axis that the mesh does not have"),
    "SC202": Code("no-match", "a pattern of the plan matches no tensor of its kind"),
    "SC203": Code("unaligned-axis", "an axis cannot shard a factor that an op keeps whole"),
    "SC204": Code("axis-used-twice", "one placement uses the same axis more than once"),
    "SC205": Code("too-many-dims", "a placement has more dims than its tensor"),
    "SC206": Code("conflict", "equally specific annotations give one tensor different placements"),
    "SC207": Code("unshardable-dim", "an axis is put on a dim that cannot be sharded"),
    "SC208": Code("plan-key", "a plan has an unknown key, or a value of the wrong kind"),
    "SC209": Code("not-honoured", "an annotation could not be honoured, or an axis was dropped: work is replicated"),
    "SC210": Code("bad-mesh", "a mesh is malformed: names, sizes or the number of ranks"),
    "SC211": Code("uneven-shard", "a size does not divide by its axes: the last shards are padded"),
    "SC212": Code("placement-text", "a placement cannot be read"),
    "SC213": Code("over-budget", "the program communicates more than the plan's budget allows"),
    "SC214": Code("over-memory", "activations need more memory than the plan's recompute budget"),
    "SC215": Code("nothing-placed", "no annotation uses the mesh, or one of its axes: its ranks do the same work"),
    "SC216": Code("whole-gradients", "the gradients of several microbatches are held whole, and not as ZeRO's shards"),
    "SC217": Code("not-fused", "kernels were asked for, and would hold more than the calls that they replace"),
    "SC218": Code("no-backward", "something of a backward pass is asked of a program for evaluation, which has none"),
    "SC220": Code("bad-schedule", "a pipeline's schedule is unknown, or not made for these stages and microbatches"),
    "SC221": Code("bad-cut", "a step cannot be cut into the stages of a pipeline, or not at the places asked for"),
    "SC222": Code("token-weights", "the tokens that a plan's loss counts cannot be counted in the input that it names"),
    "SC223": Code("pipeline-axis", "a placement names the axis of the pipeline, along which no tensor is sharded"),
    "SC224": Code("stage-costs", "costs are given that are not those of a pipeline's stages"),
    "SC225": Code("split-loss", "the mean of the microbatches' losses is not the loss of the whole batch"),
    "SC226": Code("data-parts", "ranks are to bring parts of a batch that has none, or not equal ones"),
    "SC228": Code("clip-returned", "a plan clips gradients, and no optimizer takes them: they are returned"),
    "SC229": Code("not-sent", "a plan sends rows to their experts, and none are: tokens are gathered, or need not be"),
    "SC230": Code("no-experts", "a plan limits or counts the rows of experts, and no rows are grouped by expert"),
    "SC231": Code("experts-apart", "an axis lies over dim 0 of all weights of experts that are modules of their own"),
    "SC232": Code("fixed-extent", "a program, or a number of it, cannot be had for any size of an extent by its name"),
    "SC233": Code("nothing-rounded", "a plan asks for 8-bit products, and no product has a weight that may be rounded"),
    "SC234": Code("nothing-offloaded", "a plan asks that values lie in the memory of the host, and none does"),
    "SC240": Code("context", "a plan says how attention is divided along a sequence, and it cannot be, or is not"),
    "SC250": Code("nothing-fits", "no plan of a model fits the memory of its ranks"),
    "SC251": Code("not-plannable", "the planner is asked for ranks, rows or a mesh that there is no plan for"),
    "SC301": Code("no-rule", "an op has no sharding rule"),
    "SC303": Code("rule-misfit", "the sharding rule of an op does not fit a call of the op"),
    "SC401": Code("file-cut-short", "a program file ends before its end, or is no program file"),
    "SC402": Code("file-altered", "a program file does not match its checksum"),
    "SC403": Code("file-version", "a program file or checkpoint was written by an incompatible version"),
    "SC404": Code("graph-text", "the text of a graph cannot be parsed"),
    "SC405": Code("checkpoint-damaged", "a checkpoint is incomplete, cut short or altered"),
    "SC406": Code("checkpoint-mismatch", "a checkpoint has other tensors than the program: names, shapes or dtypes"),
    "SC407": Code("no-checkpoint", "there is no checkpoint at a path"),
    "SC408": Code("checkpoint-failed", "a checkpoint could not be written or read"),
    "SC409": Code("cannot-write", "a file cannot be written, or its suffix stands for another form"),
    "SC410": Code("false-type", "an instruction of a program yields something else than the program says"),
    "SC411": Code("no-lockfile", "a lockfile is missing, cannot be read, or is none"),
    "SC412": Code("other-lock", "a lockfile was written for another program: version, mesh, plan, batch or hardware"),
    "SC413": Code("tolerance", "a tolerance for comparing with a lockfile is none"),
    "SC501": Code(
        "batch-shape", "a batch has other leaves, shapes, dtypes or Python values than the program was compiled for"
    ),
    "SC502": Code("dead-rank", "a rank of the running job died"),
    "SC503": Code("timeout", "a collective did not finish within the time limit"),
    "SC504": Code("missing-parameter", "a parameter or buffer of the program was not supplied"),
    "SC505": Code("mismatch", "a distributed value differs from the single-device value"),
    "SC506": Code("world-size", "the job has another number of ranks than the program's mesh"),
    "SC521": Code("unmet-transfer", "a send of a pipeline has no receive of the same value, or they come out of order"),
    "SC522": Code("unmet-collective", "a collective of a pipeline is not reached by exactly its group, in order"),
    "SC523": Code("deadlock", "ranks of a pipeline wait for each other in a cycle"),
    "SC524": Code("value-life", "a pipeline uses a value that is not there, makes it twice, or never frees it"),
    "SC525": Code("wrong-work", "a pipeline does not run each part of a stage once for each microbatch"),
    "SC526": Code("wrong-gradients", "a pipeline does not sum its gradients once, and then update, last"),
    "SC507": Code("index-out-of-range", "an index, a token or a label, lies outside what it counts in"),
    "SC508": Code("verify-dtype", "a program was to be verified in a dtype that gradients cannot be computed in"),
    "SC509": Code("non-finite", "a step's gradients are not finite, and the plan says to raise"),
    "SC510": Code("no-timeline", "a measured timeline is asked of what is no pipeline, or does not run for real"),
    "SC511": Code("instruction-failed", "an op refused its operands while a program ran"),
    "SC512": Code("assumption-broken", "a batch answers a question of forward otherwise than the sample did"),
    "SC513": Code("rows-dropped", "experts were given more rows than their capacity: the rest was dropped"),
    "SC517": Code("host-memory", "what a command would hold does not fit in the memory of this host"),
    "SC518": Code("not-captured", "steps were to be replayed from a CUDA graph, and cannot be captured"),
    "SC552": Code("no-metric", "a scheduler or a callback wants a metric that the training loop does not have"),
    "SC553": Code(
        "trainer-argument", "compile, or a trainer's method, is given what it cannot use, or what has no effect"
    ),
    "SC551": Code("checkpoint-in-use", "another job is writing the checkpoint"),
    "SC561": Code("uncomputed-buffer", "a buffer that no file holds has no value, and the model's code computes none"),
    "SC562": Code("no-export", "what a model's own state_dict or export holds cannot be had from a program"),
    "SC563": Code("model-mismatch", "a model that values are to be written to has other names or shapes"),
    "SC571": Code("not-generated", "a model, or a program, cannot generate"),
    "SC572": Code("generation-option", "an option of generation that is not supported, or out of range"),
    "SC573": Code("bad-prompt", "prompts that nothing can be generated from"),
    "SC574": Code("changed-weights", "weights that changed while sequences were being generated"),
    "SC541": Code("ranks-differ", "ranks of a job run different versions, plans, programs or settings"),
    "SC542": Code("replicas-differ", "ranks hold or are given different values of what should be the same"),
    "SC543": Code("absent-rank", "a rank did not come to the launch of a job within the time limit"),
    "SC544": Code("no-gradients", "gradients are asked of a program that does not return them"),
    "SC556": Code("part-ended", "the data of some ranks end before those of the others"),
    "SC557": Code("loader-state", "a loader's state cannot be kept in a checkpoint, or is not that of this loader"),
    "SC545": Code("no-output", "a result is asked for a loss or an output that its program does not return"),
    "SC547": Code("other-shape", "no step can be made on a batch of another shape than the program's, on its state"),
    "SC548": Code("padding-seen", "a batch cannot be padded: its loss, or real tokens, would see what is added"),
    "SC546": Code("not-evaluated", "an evaluation cannot be made: of nothing, or by a trainer without its model"),
}
CODES.update(COMPILER_CODES)


def merged(keyed: Iterable[tuple[Hashable, Diagnostic]]) -> list[Diagnostic]:
    """One diagnostic for all of one key: the first, which lists the tensors of the others. Layers repeat themselves."""
    families: dict[Hashable, list[Diagnostic]] = {}
    for key, diagnostic in keyed:
        families.setdefault(key, []).append(diagnostic)
    return [replace(first, also=listed(d.tensor or "" for d in followers)) for first, *followers in families.values()]


def listed(names: Iterable[str], shown: int = 3) -> str | None:
    """`a, b, c and 28 more`; None if there are none."""
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - shown} more" if len(distinct) > shown else ""
    return ", ".join(distinct[:shown]) + more if distinct else None


def nearest(word: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates that a mistyped word most likely meant, best first; case does not matter."""
    by_lower: dict[str, str] = {}
    for candidate in candidates:
        by_lower.setdefault(candidate.lower(), candidate)
    return [by_lower[match] for match in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.5)]


def suggest(word: str, candidates: Iterable[str]) -> str | None:
    """The single nearest candidate, or None when nothing is near."""
    return next(iter(nearest(word, candidates, count=1)), None)


def did_you_mean(word: str, candidates: Iterable[str], kind: str) -> str:
    """A hint: the nearest name if there is one, else what there is to choose from."""
    names = list(candidates)
    guess = suggest(word, names)
    if guess is not None:
        return f"did you mean '{guess}'?"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{kind}: {', '.join(names[:LISTED])}{more}" if names else f"there are no {kind}"
