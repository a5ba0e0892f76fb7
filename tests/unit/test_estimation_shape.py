"""Shapes of runs that `tuner estimate` refuses before anything is computed."""

from __future__ import annotations

import pytest

from tuner.commands import estimate
from tuner.configuration import misspelt_keys
from tuner.errors import InputError
from tuner.estimation import EstimateRequest


def document(**changes) -> dict:
    config = changes.pop("config", {})
    return {
        "model": "llama3-8b",
        "gpu": "h100",
        "world_size": 8,
        "seq_length": 8192,
        "global_batch_size": 128,
        **changes,
        "config": {"micro_batch_size": 1, **config},
    }


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"world_size": 7, "config": {"tensor_model_parallel_size": 2}}, "world_size"),
        ({"world_size": 6, "config": {"expert_model_parallel_size": 4}}, "world_size"),
        ({"global_batch_size": 127}, "global_batch_size"),
        ({"global_batch_size": 8, "config": {"micro_batch_size": 2}}, "global_batch_size"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(changes, field) -> None:
    with pytest.raises(InputError) as refused:
        EstimateRequest.from_document(document(**changes))
    assert refused.value.field == field


def test_sizes_that_divide_are_taken() -> None:
    request = EstimateRequest.from_document(document(config={"tensor_model_parallel_size": 2}))
    assert request.world_size == 8


def test_what_cannot_be_estimated_says_which_rules_it_breaks() -> None:
    written = document(global_batch_size=12, config={"recompute_granularity": "full"})
    written["config"]["micro_batch_size"] = 4
    with pytest.raises(InputError) as refused:
        estimate.judged_estimate(written, written, where="job.yaml")
    said = str(refused.value)
    assert all(rule in said for rule in ("R03", "R04", "P22", "cannot be estimated"))


def test_an_estimate_of_an_invalid_configuration_says_so(monkeypatch) -> None:
    monkeypatch.setattr(estimate, "estimate_document", lambda document, **_: {"fits": True})
    written = document(config={"recompute_granularity": "full"})
    answer = estimate.judged_estimate(written, written, where="job.yaml")
    assert answer["fits"]
    assert {rule["rule"] for rule in answer["broken_rules"]} == {"R03", "R04"}
    assert not estimate.judged_estimate(document(), document(), where="job.yaml")["broken_rules"]


def test_lines_take_what_the_command_line_says_of_the_run(monkeypatch, tmp_path, capsys) -> None:
    asked = []
    monkeypatch.setattr(
        estimate, "estimate_document", lambda d, **_: asked.append(d) or {"fits": True}
    )
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"world_size": 8, "config": {}}\n{"a"\n')
    assert estimate.run_estimate(None, lines, run={"gpu": "h100"}, as_json=True) == 1
    assert asked[0]["gpu"] == "h100"
    assert f"{lines}:2" in capsys.readouterr().out


def test_a_key_that_looks_like_one_that_is_read_is_pointed_out() -> None:
    written = {"model": "llama3-8b", "konfig": {}, "config": {}, "note": "mine", "id": 7}
    assert misspelt_keys(written) == ["'konfig' is not read; did you mean 'config'?"]
    assert misspelt_keys({"konfig": {}}) == []
