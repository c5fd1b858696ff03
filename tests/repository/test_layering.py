"""Imports point down: the floors of the house, and every module that lives on each.

A module imports its own room and rooms on lower floors, never one beside it; no two modules import each other, not even
for their types. A new file gets its place in `FLOORS`, and one without a place fails here. `docs/architecture.md` says
what each room is for.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent.parent
# From the ground up. A room is a package or a module; its modules are named relative to it.
FLOORS: list[dict[str, str]] = [
    {
        "kernels_triton.base": "__init__ buckets diagnostic dtypes inplace library random",
        "shardc.torch_compat": "__init__",
    },
    {
        "shardc.ir": """
            __init__ account annotation arena attention_parts attention_rings blocks buckets call_slots caller
            collectives curve dead_operands default_device derive_provenance device_rates diagnostic dot equal_layers
            files fold gc_pause graph group_axes hardware in_flight in_place index_operands layer_blocks layers
            lazy_graph lengthened links liveness mesh microbatch ops
            ops.accumulate ops.adamw ops.assumed ops.attention ops.attention_heads ops.attention_keys ops.attention_rows
            ops.attention_sums ops.attention_tiles ops.attention_window ops.buckets ops.carried_states ops.channel_sums
            ops.check_index ops.collectives ops.columns ops.context ops.cpu_attention ops.ctc ops.cumulative
            ops.cumulative_extremes ops.decomposed ops.exchange ops.expert_capacity ops.experts ops.extreme
            ops.fused_attention ops.gathered ops.group_norm ops.grouped ops.halo ops.host_copies ops.kernels ops.linear
            ops.local ops.mirror ops.pick ops.scaled ops.scan ops.scan_body ops.scan_parts ops.scan_steps ops.shift
            ops.softmax ops.squares ops.step_runs ops.streams ops.take ops.windows overlap overlap_schedule parse
            placement plain program provenance python schema slowdowns small_sums stack_room storages sums text trees
            types units verify version
        """,
    },
    {
        "kernels_triton.launch": """
            __init__ fast_launch launch machine_code partial_sums register_limits row_schedule tables
        """,
        "kernels_triton.ir": "__init__ access_map kernel naming reference row_padding table text",
        "shardc.rules": """
            __init__ attention attention_heads attention_keys attention_rows carried_states conv creation ctc
            cumulative embedding experts fft halo indexing linalg local matmul norm notation pick pointwise pool
            projection random reduction registry scaled scan section shift take view window
        """,
        "shardc.schedule": """
            __init__ build clock costs emit instructions lists pipeline prove replay schedules schedules.auto
            schedules.breadth_first schedules.dualpipe_v schedules.gpipe schedules.greedy schedules.interleaved
            schedules.judge schedules.one_f_one_b schedules.registry schedules.spell schedules.within schedules.zb_h1
            schedules.zb_v timeline wait_graph
        """,
    },
    {
        "kernels_triton.library": """
            __init__ checks kernels kernels.activation kernels.adamw kernels.arithmetic kernels.bucket
            kernels.cross_entropy kernels.dropout kernels.embedding kernels.functions kernels.group_norm kernels.moments
            kernels.norm kernels.philox kernels.rope kernels.softmax kernels.special reference reference.activation
            reference.adamw reference.cross_entropy reference.dropout reference.embedding reference.group_norm
            reference.norm reference.rope reference.softmax reference.wide
        """,
        "kernels_triton.transform": """
            __init__ broadcast_stores independent_outputs simplify strength_reduce unroll_dim
        """,
    },
    {
        "kernels_triton.ops": """
            __init__ activation adamw cross_entropy dropout embedding group_norm norm registry rope softmax
        """,
        "kernels_triton.codegen": """
            __init__ addresses codegen column_sums compensated_mean expressions row_in_registers row_looped schedules
            writer
        """,
    },
    {
        "kernels_triton.generated": "__init__ inplace_call launcher op prepared_call",
    },
    {
        "kernels_triton.bucket": "__init__ kernel layout prepared_call",
        "kernels_triton.match": "__init__ algebra launcher match op pattern run source table variants",
    },
    {
        "shardc.cost": """
            __init__ aten_kernels beside cache call_seconds decomposed failures flops memory prediction
            prediction_trace product_shapes profile streams
        """,
        "kernels_triton.gate": """
            __init__ access_width bench_timing bucket_corpus corpus gate gate_rules tune tune_generated tuning
        """,
        "shardc.plan": """
            __init__ clipping context experts fuse hardware hugging_face offload overlap packaged pipeline schema
            symbols values
        """,
    },
    {
        "shardc.passes": """
            __init__ accumulate attention_keys attention_rows base bias_products carried_states cheaper_calls
            communication communication.bucket communication.causes communication.combine communication.decompose
            communication.late_gradients communication.late_products communication.overlap communication.prefetch
            communication.report_gathers communication.split_batch context context.attention_times
            context.divide_attention context.divided_heads context.merge_keys context.pack_parts cumulative_rows
            exchanged_rows fusion fusion.analysis
            fusion.analysis.access fusion.analysis.constant_values fusion.analysis.iteration_space
            fusion.analysis.space_cache fusion.analysis.traffic fusion.analysis.view_analysis fusion.clustering
            fusion.clustering.batch_norms fusion.clustering.cluster fusion.clustering.cluster_dag
            fusion.clustering.clustering fusion.clustering.critical_collectives fusion.clustering.excluded
            fusion.clustering.fusion_graph fusion.clustering.memory_budget fusion.clustering.numeric_sensitivity
            fusion.clustering.producer_inlining fusion.clustering.rematerialize fusion.clustering.repair fusion.emit
            fusion.emit.attention_order fusion.emit.emit fusion.emit.kernel_builder fusion.fuse fusion.lowering
            fusion.lowering.activations fusion.lowering.common fusion.lowering.concat_slice fusion.lowering.functions
            fusion.lowering.group_norms fusion.lowering.integers fusion.lowering.lower_op fusion.lowering.lowered_op
            fusion.lowering.lowering_cache
            fusion.lowering.padding fusion.lowering.quotients fusion.lowering.reductions fusion.lowering.softmaxes
            fusion.lowering.special fusion.lowering.unfused gemm_padding halo_rows infer_placement infer_types
            join_squares join_sums kernel_rows memory
            memory.copy_schedule memory.offload memory.offload_states memory.recompute memory.recompute_choice
            memory.recompute_liveness memory.rerun_cost merge_updates normalize normalize.affine_positions
            normalize.decompositions normalize.decompositions.batch_norm normalize.decompositions.canonical
            normalize.decompositions.cross_entropy normalize.decompositions.embedding_bag
            normalize.decompositions.indexing normalize.decompositions.losses normalize.decompositions.masked_scatter
            normalize.decompositions.matmul normalize.decompositions.reductions normalize.decompositions.table
            normalize.decompositions.weight_norm normalize.dropped_rows normalize.group_experts normalize.imply_masks
            normalize.limit_experts normalize.mask_positions normalize.normalize normalize.quantize normalize.sum_parts
            pick_columns scan_parts sharding sharding.assign sharding.atom_classes sharding.atomize sharding.balance
            sharding.casts sharding.chunked_rows sharding.dispatch sharding.divide_scans sharding.expert_modules
            sharding.find_blocks sharding.find_sequences sharding.group_sums sharding.insert_reshards sharding.join_rows
            sharding.localize sharding.lower_reshards sharding.named_rows sharding.pool_taps sharding.prefixes
            sharding.propagate sharding.reshard_steps sharding.row_moves sharding.seed sharding.settle_partials
            sharding.spread_taps sharding.store sharding.strided_taps shifted_rows softmax softmax.online_softmax
            softmax.split_softmax softmax.statistics sum_products type_check verify verify_groups
        """,
    },
    {
        "shardc.partition": """
            __init__ balance checkpoint_bytes cross_stage_buffers cut extract_subgraph fused_costs gather_hoisting
            joined_stages memory memory_walk microbatch_sums prediction program_counter rank_costs same_cut same_state
            split_backward stage_arena stage_offload stage_parts stage_recompute staged_check staged_program
            step_analysis step_epilogue transfer_report
        """,
        "shardc.frontend": """
            __init__ amax_history append buffer_writers buffers cached_model call_forms carried_state chunk_states
            cleanup evaluation_mode expert_masks expert_notes expert_replay expert_rows experts_form few_layers
            function_caches gradients ingest join_loads layer_drop library_experts library_masks lifted_casts
            local_mutation loop_body loop_notes loop_operations loop_shapes loop_source loop_values loss_gradients
            made_anew memory_writes model_changes model_outputs model_tree op_overrides optimizer optimizer_trace
            own_values precision program_inputs program_optimizers provenance python_random python_state rolled_loops
            row_selection row_wise sample_call sample_values saved_state selected_rows size_guards spec_augment
            state_holders substitution token_weights trace traced traced_graph traced_scalar unrecorded_layers
            unsupported update_cache whole_matrices
        """,
    },
    {
        "shardc.runtime.execute": """
            __init__ arena batch body_code bucket_buffer call_arguments call_recorder data_parts decomposed_products
            direct_call executor failed_call held_views index_check instructions layout measured_timeline microbatches
            monitor over_operands overlap peer_groups prepared_code prepared_collective prepared_linear process_end
            process_groups rank_record signal_wakeup stage_code step_epilogue step_graph transfers written_code
        """,
    },
    {
        "shardc.runtime.calibrate": "__init__ calibrate device fit peers rows timing write",
        "shardc.runtime.oracle": """
            __init__ compare eager_witness lifted report rounded_products rounding simulate simulate_stages
            verification verify whole_batch
        """,
        "shardc.runtime.checkpoint": """
            __init__ checkpoint export folder held hugging_face lock manifest planners weights
        """,
        "shardc.runtime.generate": """
            __init__ continuous generator programs prompts requests result row_cache sampling search settings steps
        """,
    },
    {
        "shardc.runtime.train": """
            __init__ after_step agreement callbacks consensus device_copy ema engine evaluate expert_load feeding
            interruptions job launched loader_state loading loop loop_state lr_schedule metrics model_state nonfinite
            padding padding_trial programs progress_line rank_part rank_session recompile replicas result shapes
            starting_values trainer
        """,
    },
    {
        "shardc.compiler": """
            __init__ binding compiled decompose_auto driver fusion_default generation graphs_auto layer_copies
            pass_pipeline pipelining preparation program_check rank request split_auto step_plan what_varies
        """,
    },
    {
        "shardc.program_cache": "__init__ digest folder key place surroundings traces",
        "shardc.planner": """
            __init__ annotations autoplan axis_roles call_costs candidate candidates compiled_cost inner
            inner_placement layer_costs layers min_sum network numbers placement_program ranking reasons reduced_model
            search small_program space stages step_costs strategies
        """,
        "shardc.symbolic": """
            __init__ calls derive expression formulas instances layers measure samples stages template
        """,
    },
    {
        "shardc.explain": """
            __init__ bottleneck collective fusion halo lock_report lockfile plan_edits predicted_program provenance
            ring scaling transfer unfused what_if
        """,
    },
    {
        "shardc.page": "__init__ content render",
    },
    {
        "shardc.api": "__init__",
    },
    {
        "shardc.cli": """
            __init__ as_json cache calibrate commands console doctor generation host_memory ir_printer kernel_list
            kernel_sources left_out local_launch locking main optimizers pipeline_summary plan prediction scaling
            summary symbolic_cost targets
        """,
    },
    {
        "shardc": "__init__ __main__",
    },
]
PACKAGES = ("kernels_triton", "shardc.runtime")  # of rooms: they hold nothing but their docstring
HIGHEST_ROOT = 8  # modules of `shardc/` beside its packages


def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    files = [path for top in ("shardc", "kernels_triton") for path in (ROOT / top).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


MODULES = modules()
PLACES = {
    room if name == "__init__" else f"{room}.{name}": (floor, room)
    for floor, rooms in enumerate(FLOORS)
    for room, names in rooms.items()
    for name in names.split()
}


def imports(module: str) -> Iterator[tuple[int, str]]:
    """Modules of ours that a module imports, with lines; those inside functions and for types too."""
    path = MODULES[module]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            for alias in node.names:
                # `from shardc.ir import schema` names its module on the right.
                target = f"{node.module}.{alias.name}"
                if (target := target if target in MODULES else str(node.module)) in MODULES:
                    yield node.lineno, target


# Folders of tests that no package of `shardc` has the name of.
OTHER_TESTS = {
    "api": "the public API from end to end",
    "diagnostics": "messages, word for word",
    "distributed": "real processes",
    "files": "files that somebody altered",
    "gpu": "kernels and training on GPUs",
    "hostile": "models that make a trace difficult",
    "kernels": "kernels_triton",
    "models": "architectures of Hugging Face and others, verified",
    "properties": "random programs, plans, files and kernels",
    "repository": "documents and layering",
    "saving": "checkpoints on disks that fail",
    "user_story": "a job by torchrun, from its first line to the tools of others",
}


def test_tests_lie_in_the_folder_of_their_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "shardc").glob("*/__init__.py")}
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("**/test_*.py")}
    assert folders - rooms == set(OTHER_TESTS)
    assert rooms <= folders, "each room has tests"


def test_every_module_has_its_place() -> None:
    modules = set(MODULES) - set(PACKAGES)
    missing, gone = sorted(modules - set(PLACES)), sorted(set(PLACES) - modules)
    assert not missing, f"FLOORS gives no place to {missing}"
    assert not gone, f"FLOORS names {gone}, which are no modules"


@pytest.mark.parametrize("module", sorted(PLACES))
def test_imports_point_down(module: str) -> None:
    floor, room = PLACES[module]
    for line, target in imports(module):
        if target not in PLACES:  # a package of rooms, or a module that the test above names
            continue
        below, other = PLACES[target]
        where = f"{MODULES[module].relative_to(ROOT)}:{line}"
        assert room == other or below < floor, f"{where}: {room} is not above {other}: {target}"


def test_kernels_stand_alone() -> None:
    kernels = [module for module in MODULES if module.startswith("kernels_triton")]
    targets = [(module, target) for module in kernels for _, target in imports(module)]
    assert [(module, target) for module, target in targets if target.startswith("shardc")] == []


def test_no_two_modules_import_each_other() -> None:
    graph = nx.DiGraph([(module, target) for module in MODULES for _, target in imports(module) if target != module])
    # A package's `__init__` that gathers its modules is one thing with them.
    graph.remove_edges_from([(a, b) for a, b in graph.edges if a.startswith(f"{b}.")])
    assert list(nx.simple_cycles(graph)) == []


def test_few_modules_stand_beside_the_packages() -> None:
    alone = [name for name in MODULES if name.count(".") == 1 and MODULES[name].name != "__init__.py"]
    assert len([name for name in alone if name.startswith("shardc.")]) <= HIGHEST_ROOT


def test_packages_say_what_they_are() -> None:
    for module, path in MODULES.items():
        if path.name == "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{module} has no docstring"
