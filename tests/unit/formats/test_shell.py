"""Launch scripts as people write them: variables in all the ways that Bash has."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tuner.errors import InputError
from tuner.formats.reader import read_configuration, read_given_and_effective
from tuner.formats.shell import read_script

RUN = (
    "torchrun pretrain_gpt.py --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP}"
)


@pytest.mark.parametrize(
    ("lines", "tensor", "pipeline"),
    [
        ("TP=2; PP=4", "2", "4"),
        ("TP=2 && PP=4", "2", "4"),
        ("TP=$((2*2))\nPP=$(( TP / 2 ))", "4", "2"),
        ("DP=4\nTP=$(( (DP + 2) * 2 - 1 ))\nPP=$((-7 / 2 + ${DP}))", "11", "1"),
        ("declare -i TP=2\nreadonly PP=4", "2", "4"),
        (": ${TP:=2}\nPP=8\n: ${PP:=4}", "2", "8"),
        ("TP=${1:-2}\nPP=${2:-4}", "2", "4"),
        ("let TP=4\nPP=$((TP+1))", "4", "5"),
        ("case $SIZE in\n8b) TP=2; PP=4;;\nesac", "2", "4"),
        ("if true; then TP=8; fi\nPP=1", "8", "1"),
        ("TP=2 # not; PP=7\nPP=5", "2", "5"),
        ("TP=$(nproc)\nPP=$((UNKNOWN * 2))", "$(nproc)", "$((UNKNOWN*2))"),
    ],
)
def test_variables_are_put_in(lines: str, tensor: str, pipeline: str) -> None:
    words = read_script(f"{lines}\n{RUN}").commands[-1]
    assert (words[3], words[5]) == (tensor, pipeline)


def test_a_semicolon_in_quotes_ends_nothing() -> None:
    assert read_script("echo 'a;b' \"c;d\"; ls").commands == [["echo", "a;b", "c;d"], ["ls"]]


def test_a_variable_that_the_script_does_not_set_is_named() -> None:
    with pytest.raises(InputError, match=r"the script does not say what '\$TP' is"):
        read_configuration(RUN.replace("${PP}", "1"), mcore="0.16.1")


def test_a_model_is_no_configuration_of_a_run() -> None:
    with pytest.raises(InputError, match="hf_config"):
        read_configuration('{"model_type": "llama", "hidden_size": 64}', mcore="0.16.1")


def test_standard_input_is_read_once_for_both_readings(monkeypatch) -> None:
    run = RUN.replace("$TP", "2").replace("${PP}", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO(run))
    given, effective = read_given_and_effective(Path("-"), mcore="0.16.1")
    assert given["config"]["tensor_model_parallel_size"] == 2
    assert effective["config"]["tensor_model_parallel_size"] == 2
