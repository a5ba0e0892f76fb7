"""Spaces made to fit a model and a front end."""

import pytest

from tuner.models import get_model
from tuner.search.space import parse_space
from tuner.search.tailoring import for_frontend, for_model, missing_modules

RECOMPUTE = {
    "axes": {
        "recompute_granularity": [None, "selective"],
        "recompute_modules": {
            "subsets": ["core_attn", "mlp", "moe_act", "shared_experts", "mla_up_proj"],
            "min_modules": 1,
            "max_modules": 2,
            "when": {"recompute_granularity": "selective"},
        },
    }
}
GRAPHS = {"axes": {"cuda_graph_impl": ["none", "full_iteration"], "micro_batch_size": [1]}}


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("llama3-8b", {"moe", "moe_act", "shared_experts", "mla_up_proj"}),
        ("deepseek-v3", set()),
        ("qwen3-30b-a3b", {"mlp", "shared_experts", "mla_up_proj"}),
    ],
)
def test_modules_that_no_layer_has_are_not_recomputed(model, missing):
    model = get_model(model)
    assert missing_modules(model) == missing
    space = for_model(parse_space(RECOMPUTE, where="space"), model)
    offered = {name for axis in space.axes[1:] for modules in axis.values for name in modules}
    assert offered == {"core_attn", "mlp", "moe_act", "shared_experts", "mla_up_proj"} - missing


def test_what_a_starting_candidate_has_stays():
    start = [{"recompute_modules": ["mlp", "core_attn"]}, {"micro_batch_size": 1}]
    space = for_model(parse_space(RECOMPUTE, where="space"), get_model("qwen3-30b-a3b"), start)
    assert ("core_attn", "mlp") in space.axes[1].values
    assert ("mlp",) not in space.axes[1].values


def test_a_graph_of_the_step_comes_without_the_check_for_nan():
    space = parse_space(GRAPHS, where="space")
    assert for_frontend(space, "mcore") == space
    for frontend in ("megatron-lm", "bridge"):
        found = list(for_frontend(space, frontend).enumerate())
        assert len(found) == 2
        for flat in found:
            checked = flat.get("check_for_nan_in_loss", True)
            assert checked is (flat["cuda_graph_impl"] == "none")
    own = parse_space({**GRAPHS, "fixed": {"check_for_nan_in_loss": True}}, where="space")
    assert for_frontend(own, "bridge") == own
