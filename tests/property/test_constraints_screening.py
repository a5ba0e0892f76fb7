"""The scalar and the array form of the rules give the same verdicts."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.constraints import FRONTENDS, MCORE_VERSIONS, check, enumerate_valid, screen
from tuner.constraints.view import UNSET

CASES = Path(__file__).parents[1] / "data" / "constraints" / "cases"
VARIED = 14
SETS = list(itertools.product(MCORE_VERSIONS, FRONTENDS))


def recorded_values(version: str, frontend: str) -> dict[str, list[object]]:
    """Distinct values every field takes in the recorded cases; UNSET where a case leaves it out."""
    with gzip.open(CASES / f"{version}-{frontend}.jsonl.gz", "rt", encoding="utf-8") as lines:
        configs = [json.loads(line)["config"] for line in lines]
    values: dict[str, dict[str, object]] = {}
    for config in configs:
        for name, value in config.items():
            values.setdefault(name, {"": UNSET})[json.dumps(value)] = value
    required = ("num_layers", "hidden_size", "num_attention_heads")
    return {
        name: [v for v in found.values() if not (v is UNSET and name in required)]
        for name, found in values.items()
    }


@pytest.mark.parametrize(("version", "frontend"), SETS)
def test_screened_verdicts_equal_scalar_verdicts(version, frontend):
    generator = random.Random(f"{version} {frontend}")
    values = recorded_values(version, frontend)
    names = sorted(values)
    for _ in range(6):
        varied = generator.sample(names, VARIED)
        base = {"num_layers": 16, "hidden_size": 4096, "num_attention_heads": 32}
        base |= {"bf16": True, "params_dtype": "bf16", "pipeline_dtype": "bf16", "env": {}}
        for name in generator.sample(names, 25):
            value = generator.choice(values[name])
            if value is not UNSET:
                base[name] = value
        choices = {n: generator.sample(values[n], min(4, len(values[n]))) for n in varied}
        rows = 60
        codes = {
            n: np.array([generator.randrange(len(v)) for _ in range(rows)])
            for n, v in choices.items()
        }
        fixed = {n: v for n, v in base.items() if n not in choices}
        columns = {**fixed, **{n: (choices[n], codes[n]) for n in choices}}
        found = screen(columns, mcore=version, frontend=frontend, explain=True)
        for row in range(rows):
            candidate = dict(fixed)
            for name, options in choices.items():
                if options[codes[name][row]] is not UNSET:
                    candidate[name] = options[codes[name][row]]
            result = check(candidate, mcore=version, frontend=frontend, fixes=False)
            assert result.valid == bool(found.valid[row]), candidate
            if not result.valid:
                first = found.rule_ids[found.first_rule[row]]
                assert first in {v.rule for v in result.errors}


def test_fast_and_explained_screening_agree():
    values = {
        "tensor_model_parallel_size": [1, 2, 4, 8],
        "pipeline_model_parallel_size": [1, 2, 3, 4],
        "virtual_pipeline_model_parallel_size": [None, 2, 4],
        "recompute_granularity": [None, "full", "selective"],
    }
    generator = np.random.default_rng(0)
    columns = {n: (v, generator.integers(0, len(v), 5000)) for n, v in values.items()}
    columns |= {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16}
    columns |= {"world_size": 16, "pipeline_dtype": "bf16"}
    fast, explained = screen(columns), screen(columns, explain=True)
    assert (fast.valid == explained.valid).all()
    assert ((explained.first_rule < 0) == explained.valid).all()
    assert max(explained.counts.values()) <= 5000


SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4, unique=True)


@settings(max_examples=30, deadline=None)
@given(
    tensor=SIZES,
    pipeline=SIZES,
    context=SIZES,
    graphs=st.lists(st.sampled_from(["none", "local"]), min_size=1, unique=True),
    world=st.sampled_from([8, 24, 64]),
)
def test_enumeration_yields_exactly_the_valid_combinations(
    tensor, pipeline, context, graphs, world
):
    fixed = {
        "num_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 24,
        "world_size": world,
        "pipeline_dtype": "bf16",
        "recompute_granularity": "selective",
    }
    regions = [["attn"], ["mlp"], ["bogus"]]
    axes = [
        ("tensor_model_parallel_size", tensor, None),
        ("pipeline_model_parallel_size", pipeline, None),
        ("context_parallel_size", context, None),
        ("cuda_graph_impl", graphs, None),
        ("cuda_graph_scope", regions, {"cuda_graph_impl": ["local"]}),
    ]
    found = enumerate_valid(axes, fixed)
    got = sorted(json.dumps(found.row(i), sort_keys=True) for i in range(len(found)))
    expected = []
    total = 0
    for t, p, c, graph in itertools.product(tensor, pipeline, context, graphs):
        for region in regions if graph == "local" else [None]:
            total += 1
            candidate = dict(fixed)
            candidate["tensor_model_parallel_size"] = t
            candidate["pipeline_model_parallel_size"] = p
            candidate["context_parallel_size"] = c
            candidate["cuda_graph_impl"] = graph
            if region is not None:
                candidate["cuda_graph_scope"] = region
            if check(candidate, fixes=False).valid:
                expected.append(json.dumps(candidate, sort_keys=True))
    assert got == sorted(expected)
    assert found.enumerated == total


def test_enumeration_does_not_expand_what_already_conflicts():
    axes = [
        ("tensor_model_parallel_size", [3, 5, 7], None),
        ("micro_batch_size", list(range(1, 200)), None),
    ]
    found = enumerate_valid(
        axes, {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "world_size": 8}
    )
    assert len(found) == 0
    assert found.enumerated == 3 * 199
    assert found.expanded == 3
