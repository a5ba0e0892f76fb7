from types import SimpleNamespace

import pytest

from trainables.errors import TrialSpecError
from trainables.megatron_core.graphs import (
    captures_full_iteration,
    graphed_schedule,
    steps_until_captured,
    translate_cuda_graph_fields,
)

OLD = {"cuda_graph_impl", "cuda_graph_scope"}
NEW = {"cuda_graph_impl", "cuda_graph_modules"}
LAYER = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "mlp"]}


@pytest.mark.parametrize("known", [OLD, NEW])
@pytest.mark.parametrize("fields", [{}, {"cuda_graph_impl": "none"}, {"cuda_graph_impl": None}])
def test_no_graph_sets_no_field(fields: dict, known: set) -> None:
    assert translate_cuda_graph_fields(fields, known) == {}


def test_modules_are_a_scope_before_0_18() -> None:
    assert translate_cuda_graph_fields(LAYER, OLD) == {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_scope": ["attn", "mlp"],
    }
    assert translate_cuda_graph_fields(LAYER, NEW) == LAYER


@pytest.mark.parametrize("scope", ["attn,mlp", ["attn", "mlp"]])
def test_the_old_spelling_is_understood_by_new_versions(scope: object) -> None:
    fields = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": scope}
    assert translate_cuda_graph_fields(fields, NEW) == LAYER


@pytest.mark.parametrize(
    "fields",
    [
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
    ],
)
def test_the_whole_iteration_is_a_scope_before_and_an_implementation_from_0_18(
    fields: dict,
) -> None:
    assert translate_cuda_graph_fields(fields, OLD) == {
        "cuda_graph_impl": "local",
        "cuda_graph_scope": ["full_iteration"],
    }
    assert translate_cuda_graph_fields(fields, NEW) == {
        "cuda_graph_impl": "full_iteration",
        "cuda_graph_modules": [],
    }


def test_the_old_full_scope_is_the_whole_layer() -> None:
    fields = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "full"}
    assert translate_cuda_graph_fields(fields, NEW)["cuda_graph_modules"] == []


def test_parts_beside_the_whole_iteration_are_refused() -> None:
    fields = {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": ["attn"]}
    with pytest.raises(TrialSpecError, match="remove \\['attn'\\]"):
        translate_cuda_graph_fields(fields, NEW)


def test_warm_up_lasts_until_graphs_are_replayed() -> None:
    assert steps_until_captured({}) == 0
    assert steps_until_captured({"cuda_graph_impl": "local"}) == 5
    assert steps_until_captured({"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1}) == 3


def test_only_a_full_iteration_graph_wraps_the_schedule() -> None:
    def schedule() -> None: ...

    none = SimpleNamespace(cuda_graph_impl="none", cuda_graph_scope=[])
    layer = SimpleNamespace(cuda_graph_impl="local", cuda_graph_scope=["attn"])
    assert graphed_schedule(schedule, none) is schedule
    assert graphed_schedule(schedule, layer) is schedule


def test_full_iteration_is_recognised_in_every_version() -> None:
    scope = SimpleNamespace(name="full_iteration")  # CudaGraphScope.full_iteration
    assert captures_full_iteration(
        SimpleNamespace(cuda_graph_impl="local", cuda_graph_scope=[scope])
    )
    assert captures_full_iteration(SimpleNamespace(cuda_graph_impl="full_iteration"))
    assert not captures_full_iteration(SimpleNamespace(cuda_graph_impl="none"))
