"""Dry runs of a plan's finalists: which are made, and what they rule out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from workplaces import h100_node

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.memory.errors import RefusedError
from tuner.search.planning.confirm import confirm_plan
from tuner.search.planning.front import Ranked
from tuner.search.planning.graph_memory import captures_layers, layer_input_bytes
from tuner.search.planning.plan import Plan
from tuner.search.planning.whole import Counts
from tuner.search.planning.workplace import Workplace

LIMIT = 1_000.0
MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_TUNER_CACHE", str(tmp_path))
    # Composition is tested elsewhere; here every finalist is dry-run on one rank.
    monkeypatch.setattr("tuner.search.planning.confirm.fullest_ranks", lambda *_: [0])


def place() -> Workplace:
    return h100_node(MODEL, gpus=8, length=64, batch=64)


def plan_of(*memory: float, **changes: Any) -> Plan:
    """Candidates with these estimates, fastest first, told apart by their micro-batch."""
    best = tuple(
        Ranked(
            Candidate(micro_batch_size=number + 1, **changes),
            1.0 + number,
            held,
            LIMIT,
            {},
            {},
            exact=True,
        )
        for number, held in enumerate(memory)
    )
    return Plan(best, best, None, Counts(), 0.0, 0)


class DryRuns:
    """Stands in for `tuner estimate`: every candidate needs `more` than `memory` says of it."""

    def __init__(self, memory: tuple[float, ...], more: float) -> None:
        self._memory, self._more = memory, more
        self.asked: list[int] = []

    def __call__(self, document: Mapping[str, Any], ranks: object) -> dict[str, Any]:
        batch = int(document["config"].get("micro_batch_size", 1))
        self.asked.append(batch)
        needed = self._memory[batch - 1] + self._more
        return {
            "fits": needed <= LIMIT,
            "peak_allocated_bytes": needed,
            "peak_reserved_bytes": needed,
            "memory_fit": {"capacity_bytes": LIMIT},
        }


def batches(plan: Plan) -> list[int]:
    return [one.candidate.micro_batch_size for one in plan.best]


def test_the_fastest_are_dry_run_until_as_many_fit() -> None:
    memory = (900.0, 910.0, 920.0)
    runs = DryRuns(memory, more=10.0)
    found = confirm_plan(plan_of(*memory), place(), 2, runs)
    assert sorted(runs.asked) == [1, 2]
    assert (found.left_out, batches(found.plan)) == (0, [1, 2, 3])
    assert all(answer["fits"] for answer in found.answers.values())


def test_what_one_lacks_rules_out_those_with_as_little_room() -> None:
    memory = (990.0, 985.0, 975.0, 940.0)
    runs = DryRuns(memory, more=30.0)
    found = confirm_plan(plan_of(*memory), place(), 1, runs)
    # 990 needs 1020 and lacks 20: only estimates of at most 970 are tried after it.
    assert runs.asked == [1, 4]
    assert (found.left_out, batches(found.plan)) == (3, [4])
    assert [one.candidate.micro_batch_size for one in found.plan.pareto] == [4]


def test_kinds_of_candidates_do_not_rule_out_each_other() -> None:
    eager = plan_of(990.0).best
    graphed = plan_of(0.0, 985.0, cuda_graph_impl="transformer_engine").best[1:]
    plan = Plan((*eager, *graphed), (), None, Counts(), 0.0, 0)
    runs = DryRuns((990.0, 900.0), more=30.0)
    found = confirm_plan(plan, place(), 1, runs)
    assert runs.asked == [1, 2]
    assert batches(found.plan) == [2]


def test_what_cannot_be_dry_run_stays_and_confirms_nothing() -> None:
    memory = (900.0, 900.0)
    runs = DryRuns(memory, more=0.0)

    def estimate(document: Mapping[str, Any], ranks: object) -> dict[str, Any]:
        if document["config"].get("micro_batch_size", 1) == 1:
            raise InputError("it is not modelled")
        return runs(document, ranks)

    found = confirm_plan(plan_of(*memory), place(), 1, estimate)
    assert [answer["fits"] for answer in found.answers.values()] == [None, True]
    assert batches(found.plan) == [1, 2]


def test_what_megatron_core_refuses_is_left_out_with_others_of_that_combination() -> None:
    runs = DryRuns((900.0, 900.0, 900.0), more=0.0)
    offloading = plan_of(900.0, 900.0, fine_grained_activation_offloading=True).best
    plan = Plan((*offloading, plan_of(0.0, 0.0, 900.0).best[2]), (), None, Counts(), 0.0, 0)

    def estimate(document: Mapping[str, Any], ranks: object) -> dict[str, Any]:
        if document["config"].get("fine_grained_activation_offloading"):
            raise RefusedError("its own words").at("finalist")
        return runs(document, ranks)

    found = confirm_plan(plan, place(), 1, estimate)
    assert runs.asked == [3]
    assert (found.left_out, batches(found.plan)) == (2, [3])


def test_dry_runs_end_when_nothing_fits() -> None:
    memory = tuple(990.0 - 100 * number for number in range(9))
    runs = DryRuns(memory, more=2_000.0)
    found = confirm_plan(plan_of(*memory), place(), 1, runs)
    assert len(runs.asked) <= 4
    assert found.plan.best == ()


@pytest.mark.parametrize(
    ("implementation", "modules", "expected"),
    [
        ("transformer_engine", (), True),
        ("transformer_engine", ("attn", "mlp"), True),
        ("transformer_engine", ("attn",), False),
        ("full_iteration", (), False),
        ("none", (), False),
    ],
)
def test_which_graphs_hold_whole_layers(implementation, modules, expected) -> None:
    assert captures_layers(implementation, modules) is expected


def test_static_inputs_are_hidden_states_and_a_mask() -> None:
    setting = Candidate(
        micro_batch_size=2,
        context_parallel_size=2,
        tensor_model_parallel_size=4,
        sequence_parallel=True,
    )
    rows = 2 * 64 // 2
    assert layer_input_bytes(place().model, setting, 64) == rows * 64 + rows * 2 * 64 // 4
