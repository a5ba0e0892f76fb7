"""Layouts that balance a pipeline, read back as the rules read them."""

from collections import Counter

import pytest

from tuner.constraints.rules.layer_split import parse_layout
from tuner.models import get_model
from tuner.search.layouts import balanced_layout, with_layouts
from tuner.search.space import parse_space


@pytest.mark.parametrize("chunks", [2, 4, 8, 16, 32])
def test_a_balanced_layout_holds_every_unit_once_and_layers_are_even(chunks: int):
    model = get_model("deepseek-v3")
    parsed = parse_layout(balanced_layout(model, chunks, 4096))
    units = Counter(name for names in parsed for name in names)
    assert len(parsed) == chunks
    assert units == {"embedding": 1, "decoder": 61, "mtp": 1, "loss": 1}
    assert parsed[0][0] == "embedding"
    assert parsed[-1][-1] == "loss"
    counts = [names.count("decoder") for names in parsed if not {"loss", "mtp"} & set(names)]
    assert max(counts) - min(counts) <= 1
    ends = [names for names in parsed if {"loss", "mtp"} & set(names)]
    assert all(names.count("decoder") < max(counts) for names in ends)


def test_layouts_with_more_chunks_than_layers_are_no_values_of_the_axis():
    axes = {"pipeline_model_parallel_layout": [None, "balanced:4", "balanced:512"]}
    space = with_layouts(parse_space({"axes": axes}, where="here"), get_model("deepseek-v3"), 4096)
    (axis,) = space.axes
    assert len(axis.values) == 2
    assert axis.values[0] is None


def test_pipelines_that_layers_do_not_divide_get_balanced_layouts_unasked():
    axes = {
        "pipeline_model_parallel_size": [1, 2, 4],
        "virtual_pipeline_model_parallel_size": {
            "values": [None, 3],
            "when": {"pipeline_model_parallel_size": [2, 4]},
        },
    }
    space = parse_space({"axes": axes}, where="here")
    model = get_model("llama3.1-405b")  # 126 layers
    found = list(with_layouts(space, model, 8192).enumerate())
    chunks = {c: set() for c in (1, 2, 4)}
    for flat in found:
        layout = flat.get("pipeline_model_parallel_layout")
        virtual = flat.get("virtual_pipeline_model_parallel_size")
        assert layout is None or virtual is None
        split = len(parse_layout(layout)) if layout else virtual
        chunks[flat["pipeline_model_parallel_size"]].add(split)
    assert chunks == {1: {None}, 2: {None, 3}, 4: {4, 12}}
    assert with_layouts(space, get_model("llama3-70b"), 8192) == space  # 80 layers
    own = {**axes, "account_for_loss_in_pipeline_split": [True]}
    kept = parse_space({"axes": own}, where="here")
    assert with_layouts(kept, model, 8192) == kept
