"""Malformed input is a violation or a clear input error, never another exception."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.constraints import FRONTENDS, MCORE_VERSIONS, InputError, check, fix
from tuner.constraints.fields import catalogue

BASE = {
    "num_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "bf16": True,
    "params_dtype": "bf16",
    "pipeline_dtype": "bf16",
    "world_size": 16,
    "micro_batch_size": 1,
    "global_batch_size": 32,
    "seq_length": 1024,
}
NAMES = sorted(catalogue())
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=12)
    | st.sampled_from(["full", "selective", "local", "attn", "E|t*9999999|L", "(tt|)*99", "none"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
ASK = {"mcore": st.sampled_from(MCORE_VERSIONS), "frontend": st.sampled_from(FRONTENDS)}


@settings(max_examples=400, deadline=None)
@given(junk=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=10), JUNK, max_size=6), **ASK)
def test_any_value_in_any_field_gets_a_verdict(junk, mcore, frontend):
    result = check({**BASE, **junk}, mcore=mcore, frontend=frontend)
    json.dumps(result.to_json(), default=str)
    if not result.valid:
        assert result.errors


@settings(max_examples=40, deadline=None)
@given(junk=st.dictionaries(st.sampled_from(NAMES), JUNK, min_size=1, max_size=3), **ASK)
def test_any_broken_candidate_can_be_handed_to_fix(junk, mcore, frontend):
    found = fix({**BASE, **junk}, mcore=mcore, frontend=frontend)
    assert found.result.valid == (not found.result.errors)


@settings(max_examples=100, deadline=None)
@given(value=JUNK)
def test_what_is_no_candidate_is_an_input_error(value):
    if isinstance(value, dict):
        check(value)
        return
    with pytest.raises(InputError):
        check(value)


@pytest.mark.parametrize("key", [3, None, ("a",)])
def test_field_names_must_be_strings(key):
    with pytest.raises(InputError, match="strings"):
        check({**BASE, key: 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_model_parallel_size", 0),
        ("tensor_model_parallel_size", -2),
        ("tensor_model_parallel_size", 2.5),
        ("tensor_model_parallel_size", "2"),
        ("tensor_model_parallel_size", None),
        ("tensor_model_parallel_size", True),
        ("num_layers", 10**9),
        ("world_size", 10**9),
        ("hidden_size", math.nan),
        ("hidden_dropout", math.inf),
        ("recompute_modules", "mlp,moe" * 3),
        ("recompute_modules", [1, 2]),
        ("recompute_modules", {"a": 1}),
        ("env", ["A=1"]),
        ("env", {"A": [1]}),
        ("pipeline_model_parallel_layout", "Et*999999999|L"),
        ("pipeline_model_parallel_layout", [["embedding", 3]]),
        ("comm_overlap", "yes"),
        ("params_dtype", "float7"),
        ("bf16", "yes"),
    ],
)
def test_impossible_value_is_a_violation_that_names_the_field(field, value):
    result = check({**BASE, field: value})
    assert not result.valid
    assert any(field in v.fields for v in result.errors)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), **ASK)
def test_well_typed_values_never_leave_a_rule_undecided(data, mcore, frontend):
    config = dict(BASE)
    for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=12, unique=True)):
        field = catalogue()[name]
        if name in BASE or mcore not in field.default:
            continue
        kind = field.kind
        if field.choices:
            config[name] = data.draw(st.sampled_from(field.choices))
        elif kind == "bool":
            config[name] = data.draw(st.booleans())
        elif kind in ("int", "int|ints"):
            low, high = field.bounds or (-4, 64)
            config[name] = data.draw(st.integers(max(low, -4), min(high, 64)))
        elif kind in ("float", "float|floats"):
            config[name] = data.draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]))
    result = check(config, mcore=mcore, frontend=frontend, fixes=False)
    assert not [v for v in result.violations if "cannot be decided" in v.message]
