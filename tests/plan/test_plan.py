from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.placement import P, Placement
from shardc.plan.schema import Annotation, Plan, bytes_text, match, read_bytes

PLANS = sorted((Path(__file__).parent.parent.parent / "configs" / "plans").glob("*.yaml"))


def annotation(pattern: str, text: str = "tp") -> Annotation:
    return Annotation(pattern, Placement.parse(text))


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("w", "w", True),
        ("h.*.w", "h.0.w", True),
        ("h.*.w", "h.0.1.w", False),
        ("h.*", "h", False),
        ("l*.w", "ln.w", True),
        ("l*.w", "l.n.w", False),
        ("**.w", "w", True),
        ("**.w", "a.b.w", True),
        ("**.w", "aw", False),
        ("a.**.w", "a.w", True),
        ("a.**.w", "a.b.c.w", True),
        ("a.**.w", "ab.w", False),
        ("h.**", "h", True),
        ("h.**", "h.0.w", True),
        ("h.**", "hh", False),
        ("**", "", True),
        ("**", "a.b", True),
        ("**.h.**.w", "h.w", True),
        ("a+b", "aab", False),
        ("a.b", "axb", False),
    ],
)
def test_globs(pattern: str, name: str, expected: bool) -> None:
    assert annotation(pattern).matches(name) is expected


def test_the_most_specific_wins() -> None:
    ladder = ["**", "**.weight", "h.**.weight", "h.*.mlp.*", "h.*.mlp.weight", "h.0.mlp.weight"]
    annotations = [annotation(pattern, f"a{i}") for i, pattern in enumerate(ladder)]
    assert sorted(annotations, key=lambda one: one.specificity) == annotations
    for last in range(1, len(ladder) + 1):
        assert match(annotations[:last], ["h.0.mlp.weight"], "params")["h.0.mlp.weight"] is annotations[last - 1]


def test_a_tie_is_an_error_only_if_it_matters() -> None:
    names = ["h.0.w"]
    assert match([annotation("h.*.w", "tp"), annotation("*.0.w", "tp, -")], names, "params").keys() == {"h.0.w"}
    with pytest.raises(ShardcError, match="SC206"):
        match([annotation("h.*.w", "tp"), annotation("*.0.w", "dp")], names, "params")


def test_tied_parameters() -> None:
    tied = {"wte.weight": ("lm_head.weight",)}

    def placed(*annotations: Annotation) -> str:
        return str(match(annotations, tied, "params", tied)["wte.weight"].placement)

    assert placed(annotation("lm_head.weight")) == "tp"
    assert placed(annotation("lm_head.weight"), annotation("wte.weight")) == "tp"
    assert placed(annotation("**.lm_head.weight"), annotation("**.weight", "-, tp")) == "tp"
    with pytest.raises(ShardcError, match=r"SC206.*one tied tensor"):
        placed(annotation("lm_head.weight"), annotation("wte.weight", "-, tp"))


def test_python_annotations_know_their_line() -> None:
    plan = Plan.of(params={"w": P(None, "tp")})
    assert plan.params["w"].cause("a.w").startswith('a.w = "-, tp"   (test_plan.py:')


def test_yaml_annotations_know_their_line() -> None:
    plan = Plan.parse('mesh: tp=2\n\nparams:\n  # a comment\n  "**.w": "-, tp"\n', "some.yaml")
    assert plan.params["**.w"].origin == "some.yaml:5"


def test_dtensor_placements_and_meshes() -> None:
    plan = Plan.of(mesh={"dp": 2, "tp": 2}, params={"w": [Replicate(), Shard(1)]}, inputs={"x": ("dp", None)})
    assert plan.mesh == Mesh(dp=2, tp=2)
    assert str(plan.params["w"].placement) == "-, tp"


def test_merge() -> None:
    base = Plan.of(mesh="dp=2", params={"a": "dp", "b": "dp"}, budget={"dp": "1 KiB"}, seed=3)
    merged = base.merge(Plan.from_dict({"params": {"b": "-"}, "strict": True}))
    assert merged == Plan.of(mesh="dp=2", params={"a": "dp", "b": "-"}, budget={"dp": 1024}, seed=3, strict=True)


texts = st.sampled_from(["", "-", "tp", "dp, -", "?, 3*tp", "dp.tp"])
patterns = st.text(alphabet="ab.*0", min_size=1, max_size=6)
maps = st.dictionaries(patterns, texts, max_size=3)


@given(maps, maps, st.sampled_from([None, "dp=2,tp=4"]), st.booleans(), st.integers(0, 2**40))
def test_yaml_round_trips(
    params: dict[str, str], activations: dict[str, str], mesh: str | None, strict: bool, size: int
) -> None:
    plan = Plan.of(mesh=mesh, params=params, activations=activations, strict=strict, budget={"tp": size}, seed=size)
    assert Plan.parse(plan.dump()) == plan


@given(st.integers(0, 2**50))
def test_bytes_round_trip(size: int) -> None:
    assert read_bytes(bytes_text(size)) == size


def test_bytes() -> None:
    assert [read_bytes(text) for text in (7, "2MiB", "1.5 kb", "3 GB")] == [7, 2**21, 1500, 3 * 10**9]


@pytest.mark.parametrize(
    ("said", "dumped"),
    [
        ("none", ""),
        ("full", "recompute: full\n"),
        ({"mode": "full", "collectives": True}, "recompute:\n  mode: full\n  collectives: true\n"),
        ({"budget": "20GiB"}, "recompute:\n  budget: 20 GiB\n"),
        ({"mode": "budget", "budget": 7, "collectives": True}, "recompute:\n  budget: 7 B\n  collectives: true\n"),
    ],
)
def test_recompute_round_trips(said: str | dict[str, object], dumped: str) -> None:
    plan = Plan.of(recompute=said)
    assert plan.dump() == dumped
    assert Plan.parse(dumped).recompute == plan.recompute
    assert Plan.of(recompute="selective").merge(plan).recompute == plan.recompute
    assert plan.merge(Plan.of(mesh="dp=2")).recompute == plan.recompute


@pytest.mark.parametrize(
    ("said", "dumped"),
    [
        ("auto", ""),
        ("all_to_all", "experts: all_to_all\n"),
        ({"dispatch": "all_gather"}, "experts: all_gather\n"),
        ({}, ""),
        ({"capacity": "exact", "overflow": "drop", "load": False}, ""),
        ({"capacity": 2}, "experts:\n  capacity: 2.0\n"),
        (
            {"dispatch": "all_to_all", "capacity": 1.25, "overflow": "error", "load": True},
            "experts:\n  dispatch: all_to_all\n  capacity: 1.25\n  overflow: error\n  load: true\n",
        ),
    ],
)
def test_experts_round_trip(said: str | dict[str, object], dumped: str) -> None:
    plan = Plan.of(experts=said)
    assert plan.dump() == dumped
    assert Plan.parse(dumped).experts == plan.experts
    assert Plan.of(experts="all_gather").merge(plan).experts == plan.experts


def test_a_wrong_key_of_experts_is_hinted_at_by_those_of_experts() -> None:
    for key, hint in (
        ("dispach", "did you mean 'dispatch'?"),
        ("room", "keys of experts: dispatch, capacity, overflow, load"),
    ):
        with pytest.raises(ShardcError) as refused:
            Plan.parse(f"experts: {{{key}: all_to_all}}", "plan.yaml")
        assert refused.value.diagnostics[0].hint == hint


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("experts: all_to_al", r"'experts.dispatch' should be one of auto, all_to_all, all_gather, not 'all_to_al'"),
        ("experts: {dispatch: [all_to_all]}", r"'experts.dispatch' should be one of .*, not \['all_to_all'\]"),
        ("experts: {dispatch: true}", r"'experts.dispatch' should be one of .*, not True"),
        ("experts: true", r"'experts' should be a mapping, not True"),
        ("experts: [all_to_all]", r"'experts' should be a mapping"),
        ("experts: {dispach: all_to_all}", r"experts has no key 'dispach'"),
        ("experts: {room: 2}", r"experts has no key 'room'"),
        ("experts: {capacity: 0.9}", r"'experts.capacity' should be exact, or a factor of 1 or more, not 0.9"),
        ("experts: {capacity: .nan}", r"'experts.capacity' should be exact, or a factor of 1 or more, not nan"),
        ("experts: {capacity: .inf}", r"'experts.capacity' should be exact, or a factor of 1 or more, not inf"),
        ("experts: {capacity: true}", r"'experts.capacity' should be exact, or a factor of 1 or more, not True"),
        ("experts: {capacity: '1.25'}", r"'experts.capacity' should be exact, or a factor of 1 or more, not '1.25'"),
        ("experts: {capacity: 2, overflow: skip}", r"'experts.overflow' should be one of drop, error, not 'skip'"),
        ("experts: {overflow: error}", r"'experts.overflow' is error, and experts without a capacity take every row"),
        ("experts: {load: 1}", r"'experts.load' should be true or false, not 1"),
    ],
)
def test_bad_experts_are_refused(said: str, message: str) -> None:
    with pytest.raises(ShardcError, match=message) as refused:
        Plan.parse(said, "plan.yaml")
    (wrong,) = refused.value.diagnostics
    assert wrong.code == "SC208"
    assert wrong.location == "plan.yaml:1"
    assert wrong.hint


@pytest.mark.parametrize(
    ("said", "dumped"),
    [
        ("mean", ""),
        ({"tokens": "labels"}, "loss:\n  tokens: labels\n"),
        ({"tokens": "y", "ignore": 0, "shift": 1}, "loss:\n  tokens: y\n  ignore: 0\n  shift: 1\n"),
    ],
)
def test_loss_round_trips(said: str | dict[str, object], dumped: str) -> None:
    plan = Plan.of(loss=said)
    assert plan.dump() == dumped
    assert Plan.parse(dumped).loss == plan.loss
    assert Plan.of(loss={"tokens": "x"}).merge(plan).loss == plan.loss
    assert plan.merge(Plan.of(mesh="dp=2")).loss == plan.loss


def test_over_budget() -> None:
    mesh = Mesh(dp=2, tp=2)
    plan = Plan.of(budget={"tp": "1 KiB", "total": 4096, "cp": 1})
    messages = [one.message for one in plan.over_budget({"tp": 2048, "dp": 1024}, mesh)]
    assert messages == [
        "2 KiB a rank and step on axis 'tp'; the budget is 1 KiB",
        "the budget names 'cp', which is no axis of the mesh (dp=2, tp=2)",
    ]


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_plans_we_ship(path: Path) -> None:
    plan = Plan.load(path)
    assert plan.mesh is not None
    assert Plan.parse(plan.dump()) == plan


def test_from_hf() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64, eos_token_id=0
    )
    model = transformers.LlamaForCausalLM(config)
    plan = Plan.from_hf(model)
    found = match(plan.annotations("params"), [name for name, _ in model.named_parameters()], "params")
    placed = {name.removeprefix("model.layers.0."): str(one.placement) for name, one in found.items()}
    column, row = "tp, -", "-, tp"
    assert placed == {
        "model.embed_tokens.weight": column,
        "self_attn.q_proj.weight": column,
        "self_attn.k_proj.weight": column,
        "self_attn.v_proj.weight": column,
        "self_attn.o_proj.weight": row,
        "mlp.gate_proj.weight": column,
        "mlp.up_proj.weight": column,
        "mlp.down_proj.weight": row,
        "lm_head.weight": column,
    }


def test_from_hf_expert_weights_are_stacked() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=1, hidden_size=32, moe_intermediate_size=16, num_experts=4, num_attention_heads=4, head_dim=8
    )
    plan = Plan.from_hf(transformers.Qwen3MoeForCausalLM(config), axis="model")
    experts = {name.rpartition(".")[2]: str(one.placement) for name, one in plan.params.items() if "experts" in name}
    assert experts == {"gate_up_proj": "-, 2*model, -", "down_proj": "-, -, model"}


def test_from_hf_needs_a_plan() -> None:
    with pytest.raises(ShardcError, match=r"SC208.*brings no tp_plan"):
        Plan.from_hf(object())
