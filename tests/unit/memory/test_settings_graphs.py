"""CUDA graphs: what their private pools keep, and what stays static outside them."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import HIDDEN_BYTES, LAYERS, LENGTH, MODELS, kept, run

from tuner.candidate import Candidate
from tuner.memory import DryRun, dry_run
from tuner.memory.allocator_replay import replay
from tuner.memory.trace import EMPTY_CACHE, MODEL_BUILT, Trace, step_end, step_start

_MIB = 1 << 20


def graphed(model: str, implementation: str, *modules: str, **config: object) -> DryRun:
    return run(model, cuda_graph_impl=implementation, cuda_graph_modules=modules, **config)


def pool_bytes(found: DryRun) -> int:
    """The most that private pools held at once."""
    trace = found.trace
    assert trace.pool is not None
    return int(np.cumsum(np.where(trace.pool > 0, trace.bytes, 0)).max())


def pools_of_last_step(found: DryRun, phase: str) -> set[bool]:
    """Whether what `phase` allocates in the last step comes from private pools."""
    trace = found.trace
    window = slice(trace.marker(step_start(3)), trace.marker(step_end(3)))
    chosen = trace.phase[window] == trace.phase_names.index(phase)
    return set((trace.pool[window][chosen & (trace.bytes[window] > 0)] > 0).tolist())


@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
def test_the_pool_holds_what_captured_layers_keep_for_backward(implementation) -> None:
    eager, captured = run("dense"), graphed("dense", implementation)
    layers = kept(eager) - 2 * HIDDEN_BYTES  # less what embedding and head keep
    assert pool_bytes(captured) == pytest.approx(layers, rel=0.25)
    assert captured.resident_bytes > eager.peak_allocated_bytes


def test_replays_allocate_next_to_nothing_in_captured_layers() -> None:
    eager, captured = run("dense"), graphed("dense", "transformer_engine")
    assert kept(eager) > LAYERS * 4 * HIDDEN_BYTES
    trace = captured.trace
    names = [name.startswith("decoder.layers.") for name in trace.module_names]
    window = slice(trace.marker(step_start(3)), trace.marker(step_end(3)))
    made = trace.bytes[window] > 0
    forward = trace.phase[window] == trace.phase_names.index("forward")
    inside = np.array(names)[trace.module[window]]
    assert trace.bytes[window][made & forward & inside].sum() < HIDDEN_BYTES


def test_every_captured_layer_has_a_static_input() -> None:
    more = graphed("dense", "transformer_engine").static_bytes - run("dense").static_bytes
    assert more > LAYERS * HIDDEN_BYTES


def test_parts_of_a_layer_take_less_into_the_pool_than_all_of_it() -> None:
    parts = [
        pool_bytes(graphed("moe", "transformer_engine", *modules))
        for modules in (
            ("moe_router",),
            ("moe_router", "moe_preprocess"),
            ("attn", "moe_router", "moe_preprocess"),
        )
    ]
    assert parts[0] < parts[1] < parts[2]


def test_the_pool_holds_each_micro_batch_in_flight() -> None:
    first, last = (
        pool_bytes(
            graphed("dense", "transformer_engine", rank=rank, pipeline_model_parallel_size=2)
        )
        for rank in (0, 1)
    )
    assert first == pytest.approx(2 * last, rel=0.2)


@pytest.mark.parametrize(
    "spelling",
    [
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": ("full_iteration",)},
    ],
)
def test_a_graph_of_the_whole_iteration_keeps_all_of_it(spelling) -> None:
    eager, captured = run("dense"), run("dense", **spelling)
    held = kept(eager) + eager.breakdown["logits and loss"]
    assert pool_bytes(captured) == pytest.approx(held, rel=0.01)  # batches lie outside
    assert pools_of_last_step(captured, "forward") == {True}
    assert pools_of_last_step(captured, "backward") == {True}
    assert pools_of_last_step(captured, "optimizer") == {False}


def test_a_graph_of_the_whole_iteration_reads_the_same_batches_again() -> None:
    split = run("dense", cuda_graph_impl="full_iteration", context_parallel_size=2)
    assert pool_bytes(split) == pytest.approx(
        pool_bytes(run("dense", cuda_graph_impl="full_iteration")) / 2, rel=0.1
    )


def test_masks_of_captured_layers_are_counted_where_they_are_large() -> None:
    length, layers = 4096, MODELS["dense"].num_layers
    eager, captured = (
        dry_run(
            MODELS["dense"],
            Candidate.from_flat(graphs),
            world_size=1,
            seq_length=length,
            global_batch_size=2,
        )
        for graphs in ({}, {"cuda_graph_impl": "transformer_engine"})
    )
    more = captured.static_bytes - eager.static_bytes
    hidden = HIDDEN_BYTES * length // LENGTH
    assert more == pytest.approx(layers * (length * length + 2 * hidden), rel=0.1)


def test_memory_of_a_private_pool_serves_no_one_else() -> None:
    events = [(0, 4 * _MIB, 1), (0, -4 * _MIB, 1), (1, 4 * _MIB, 0), (2, 4 * _MIB, 1)]
    assert replay(_trace(events)).peak_reserved_bytes == 40 * _MIB


def test_an_emptied_cache_makes_room_for_a_pool() -> None:
    events = [(0, 16 * _MIB, 0), (0, -16 * _MIB, 0), (1, 16 * _MIB, 1)]
    kept_cache = replay(_trace(events)).peak_reserved_bytes
    emptied = replay(_trace(events, (2, EMPTY_CACHE))).peak_reserved_bytes
    assert (kept_cache, emptied) == (32 * _MIB, 16 * _MIB)


def _trace(events: list[tuple[int, int, int]], *markers: tuple[int, str]) -> Trace:
    """A trace of (block, bytes, pool) events."""
    block, size, pool = (np.array(column) for column in zip(*events, strict=True))
    codes = np.zeros(len(events), dtype=np.int32)
    return Trace(
        block=block,
        bytes=size,
        module=codes,
        phase=codes,
        category=codes,
        module_names=("",),
        phase_names=("",),
        category_names=("",),
        markers=((0, MODEL_BUILT), *markers),
        pool=pool.astype(np.int32),
    )
