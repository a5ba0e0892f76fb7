"""Conditions, cases and loops of launch scripts: the reader runs what Bash runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tuner.errors import InputError
from tuner.formats.reader import expand, read_configuration, read_document
from tuner.formats.shell import read_script

RUN = 'torchrun "${ARGS[@]}" --tp $TP --pp $PP'
SCRIPTS = {
    "if": "if [ $TP -gt 1 ]; then PP=4; fi",
    "if else on strings": 'MODEL=8b\nif [ "$MODEL" = "70b" ]; then\n  TP=8\nelse\n  TP=4\nfi',
    "elif": "N=16\nif ((N > 32)); then PP=8\nelif (( N > 8 )); then PP=2\nelse PP=1; fi",
    "no one set it": 'if [ -z "${FP8}" ]; then TP=2; else ARGS+=(--fp8); fi',
    "someone set it": "FP8=1\nif [[ -n $FP8 ]]; then\nARGS+=(\n  --fp8 hybrid\n)\nfi",
    "on one line": "FP8=1; if [ $FP8 = 1 ]; then ARGS+=(--fp8 hybrid); TP=2; fi; PP=2",
    "pattern": "MODEL=llama3_8b\nif [[ $MODEL == llama3* && ! $MODEL == *70b ]]; then TP=1; fi",
    "either": 'A=1; if [ "$A" = 2 ] || [ "$A" = 1 ]; then PP=2; fi',
    "both": "A=1; if [ $A -eq 1 -a $A -lt 1 ]; then PP=2; fi",
    "without if": "A=1\n[ $A = 1 ] && TP=8\n[ $A = 2 ] && PP=8\n[ $A = 2 ] || PP=16",
    "case": "S=8b\ncase $S in\n  1b) TP=1 ;;\n  8b|9b) TP=2; PP=2 ;;\n  *) TP=8 ;;\nesac",
    "case with a default": 'S=7b\ncase "$S" in\n(1b) TP=1;;\n*) PP=8;;\nesac',
    "a condition in a case": (
        "A=x\ncase $A in\nx)\n if [ 1 -eq 2 ]; then PP=3; else PP=5; fi\n;;\ny) TP=7;;\nesac"
    ),
    "options of the script": (
        'while [[ $# -gt 0 ]]; do\n  case $1 in\n    --tp) TP="$2"; shift 2;;\n'
        "    *) exit 1;;\n  esac\ndone"
    ),
    "no arguments": 'for one in "$@"; do TP=$one; done\nif [ $# -lt 1 ]; then PP=2; fi',
    "inside what does not run": "if false; then if true; then TP=9; fi; PP=9; else PP=3; fi",
    "not": "if ! [ $TP -eq 1 ]; then PP=6; fi",
    "until": "until [ 1 -eq 1 ]; do TP=9; done",
    "a default": "if [ ${GPUS:-8} -ge 8 ]; then PP=8; fi",
    "a condition over two lines": "M=8b\n[[ $M == 70b ]] &&\n  TP=16\n[[ $M == 8b ]] ||\nPP=16",
    "a group": "[ 2 -gt 3 ] && {\nTP=3\nPP=4\n}\n[ 2 -gt 3 ] || { TP=5; }\n[ 1 = 1 ] || { PP=9; }",
    "an empty array": (
        "ARGS=(); ARGS+=(--x 1)\ndeclare -a MORE=(--y 2)\nMORE+=(--z)\nARGS+=(${MORE[@]})"
    ),
    "a part of a value": 'A=llama\nif [ "${A:-x}" = llama ]; then TP=7; fi',
    "an option where set": "X=1\nARGS+=(${X:+--flag} ${Y:+--other} ${Y:-${Z:-3}})",
    "exports": "export A TP=4\nexport PP=$TP",
    "a document": (
        "cat > cfg.py <<'EOT'\nif x == 1:\n    it's = 2\nfi\nEOT\n"
        "if [ 1 = 2 ]; then\ncat <<EOT\nfi\nEOT\nTP=9\nelse\nPP=4\nfi"
    ),
    "nothing": "MORE=\nARGS+=($MORE)\nTP='2 '$MORE",
    "arithmetic": "GPUS=16\nif [ $((GPUS / TP)) -eq 8 ]; then PP=8; fi",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_runs_is_what_bash_runs(name: str, tmp_path: Path) -> None:
    text = f"ARGS=(--bf16)\nTP=2\nPP=1\n{SCRIPTS[name]}\n{RUN}\n"
    bash = "torchrun() { printf '%s\\n' torchrun \"$@\"; }\n" + text
    ran = subprocess.run(
        ["bash", "-c", bash], capture_output=True, text=True, env={}, check=True, cwd=tmp_path
    )
    script = read_script(text)
    assert script.commands[-1] == ran.stdout.split()
    assert script.undecided == []


STARTED = {
    "positional": ("TP=$1\nPP=${2:-7}", ["4"]),
    "two": ("TP=$1\nPP=${2:-7}", ["4", "8"]),
    "a variable": ("TP=${TENSOR:-1}\nPP=$((NODES * 2))", ["TENSOR=8", "NODES=4"]),
    "a variable that the script sets": ("NODES=2\nPP=$NODES", ["NODES=4"]),
    "chosen by an argument": ('case "$1" in\n8b) TP=1;;\n70b) TP=4; PP=4;;\nesac', ["70b"]),
    "their number": ("if [ $# -ge 2 ]; then TP=$2; fi", ["a", "16"]),
    "passed on": ('ARGS+=("$@")', ["--x", "1"]),
    "passed on without quotes": ("ARGS+=($*)", ["--x", "1"]),
    "shifted": ("TP=$1; shift\nPP=$1\nshift 1\nARGS+=(${@})", ["2", "4", "--y"]),
    "too few to shift": ("shift 3\nTP=$1", ["2"]),
    "the rest": ('ARGS+=("${@:2}")\nTP=$1', ["4", "--x", "1"]),
    "some of the rest": ("ARGS+=(${@:2:2})", ["4", "--x", "1", "--y"]),
    "a comment beside their number": (
        "if [ $# -lt 1 ]; then TP=1; else TP=$1; fi # use $1 if it's there",
        ["3"],
    ),
    "an option with its value": (
        "ARGS+=(${FP8:+--fp8-format hybrid} ${NO:+--not this})",
        ["FP8=1"],
    ),
    "a function": ("run() {\n  TP=$1\n  shift\n  PP=$1\n}\nrun 4 8\nARGS+=($1)", ["2"]),
    "a function on one line": ("set_tp() { local n=$1; TP=$n; }\nset_tp 16", ["2"]),
    "a function with the keyword": ("function go\n{\nfor x in 1; do TP=$2; done\n}\ngo 1 4", ["2"]),
    "a function that takes all": (
        "parse() {\n  while [ $# -gt 0 ]; do\n    case $1 in\n      --tp) TP=$2; shift 2;;\n"
        '      *) shift;;\n    esac\n  done\n}\nparse "$@"',
        ["--a", "--tp", "8"],
    ),
    "functions that call": ("a() { TP=$1; }\nb() {\n a 4\n PP=$1\n}\nb 2", ["1"]),
    "set by the script": ("set -- 8 4\nTP=$1\nPP=$2", []),
    "options": (
        "while [[ $# -gt 0 ]]; do\n  case $1 in\n    --tp) TP=$2; shift 2;;\n"
        "    --pp=*) PP=9; shift;;\n    *) ARGS+=($1); shift;;\n  esac\ndone",
        ["--more", "--tp", "4", "--pp=2"],
    ),
    "options on one line": (
        'while [ -n "$1" ]; do case $1 in -t) TP=$2; shift;; -p) PP=3;; esac; shift; done',
        ["-p", "-t", "8"],
    ),
}


@pytest.mark.parametrize("name", STARTED)
def test_what_a_script_is_started_with_counts_as_in_bash(name: str, tmp_path: Path) -> None:
    lines, given = STARTED[name]
    text = f"ARGS=(--bf16)\nTP=${{TP:-2}}\nPP=${{PP:-1}}\n{lines}\n{RUN}\n"
    bash = "torchrun() { printf '%s\\n' torchrun \"$@\"; }\n" + text
    arguments = [word for word in given if "=" not in word or word.startswith("-")]
    env = dict(word.split("=") for word in given if word not in arguments)
    ran = subprocess.run(
        ["bash", "-c", bash, "launch.sh", *arguments],
        capture_output=True,
        text=True,
        env=env,
        check=True,
        cwd=tmp_path,
    )
    assert read_script(text, given).commands[-1] == ran.stdout.split()


def test_functions_that_call_themselves_end() -> None:
    text = "a() {\n a $1\n b\n}\nb() {\n a 1\n b\n}\na 2\ntorchrun x.py --tp 1"
    assert read_script(text, ["3"]).commands[-1] == ["torchrun", "x.py", "--tp", "1"]


def test_functions_that_nobody_calls_are_read_at_the_end() -> None:
    script = read_script("run() {\n torchrun x.py --tp $1\n}\ntrap run EXIT", ["3"])
    assert script.commands[-1] == ["torchrun", "x.py", "--tp", "$1"]


def test_a_loop_that_adds_arguments_is_read_once() -> None:
    text = 'while [ $# -gt 0 ]; do set -- more "$@"; done\ntorchrun x.py "$@"'
    assert read_script(text, ["--tp"]).commands[-1] == ["torchrun", "x.py", "more", "--tp"]


def test_options_among_the_arguments_stand_once() -> None:
    text = 'torchrun pretrain_gpt.py --num-layers 2 "$@"'
    read = read_configuration(text, mcore="0.16.1", started_with=["--bf16", "--micro-batch-size=2"])
    assert read["config"]["micro_batch_size"] == 2
    assert read["config"]["bf16"] is True


def test_arguments_are_for_scripts(tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text("pretrain_gpt.py --num-layers $1 --hidden-size ${H:-64}")
    document = {"megatron_script": "launch.sh", "script_args": ["12", "H=128"]}
    read = expand(document, mcore="0.16.1", where="job", base=tmp_path)
    assert read["config"]["num_layers"] == 12
    assert read["config"]["hidden_size"] == 128
    assert "script_args" not in read
    for wrong in (
        {"megatron_args": "--num-layers 2", "script_args": ["12"]},
        {"megatron_script": "launch.sh", "script_args": "12"},
        {"megatron_script": "launch.sh", "script_args": [12, {"H": 1}]},
        {"megatron_script": "launch.sh", "script_args": [True]},
    ):
        with pytest.raises(InputError, match="script_args"):
            expand(wrong, mcore="0.16.1", where="job", base=tmp_path)
    started = expand(
        {**document, "script_args": ["12"]},
        mcore="0.16.1",
        where="job",
        base=tmp_path,
        started_with=["H=256"],
    )
    assert started["config"]["hidden_size"] == 256
    for wrong in (5, "70b"):
        path = tmp_path / "job.yaml"
        path.write_text(f"megatron_script: launch.sh\nscript_args: {wrong}\n")
        with pytest.raises(InputError, match="script_args"):
            read_document(path, mcore="0.16.1", started_with=["12"])
    with pytest.raises(InputError, match="no launch script"):
        read_configuration("config: {}", mcore="0.16.1", started_with=["12"])


@pytest.mark.parametrize(
    ("lines", "condition"),
    [
        ("if [ -f ckpt ]; then TP=4; else TP=8; fi", "if [ -f ckpt ]"),
        ("if [[ $(hostname) == a* ]]; then TP=4; else TP=8; fi", "if [[ $(hostname) == a* ]]"),
        ("if nvidia-smi | grep -q H100; then TP=4; else TP=8; fi", "if nvidia-smi"),
        ("case $SIZE in\n8b) TP=4;;\n70b) TP=8;;\nesac", "case $SIZE"),
        ("TP=4\n[ -f ckpt ] && TP=8", "&& TP=8"),
        ("TP=4\nnvidia-smi | grep -q H100 && TP=8", "&& TP=8"),
        ("A=llama\nif [ ${A:0:2} = ll ]; then TP=4; else TP=8; fi", "if [ ${A:0:2} = ll ]"),
        (
            "if [[ ( a = a || b = c ) && c = d ]]; then TP=4; else TP=8; fi",
            "if [[ ( a = a || b = c ) && c = d ]]",
        ),
    ],
)
def test_what_only_a_run_decides_is_read_both_ways_and_noted(lines: str, condition: str) -> None:
    run = "torchrun pretrain_gpt.py --tensor-model-parallel-size $TP"
    assert condition in read_script(f"{lines}\n{run}").undecided
    document = read_configuration(f"{lines}\n{run}", mcore="0.16.1")
    assert document["config"]["tensor_model_parallel_size"] == 8
    assert any(condition in note for note in document["notes"])


@pytest.mark.parametrize(
    "text", ["fi", "esac\ndone", "if", "case in", "case x in", "else\nTP=1", ";;", "while\ndo"]
)
def test_keywords_out_of_place_break_nothing(text: str) -> None:
    read_script(f"{text}\ntorchrun --tp 1")


@pytest.mark.parametrize(
    "text",
    [
        "until torchrun --tp 1; do sleep 1; done",
        "if ! torchrun --tp 1; then exit 1; fi",
        "if torchrun --tp 1; then echo; fi",
        "cat > job.sh <<EOT\n#!/bin/bash\ntorchrun --tp 1\nEOT\nsbatch job.sh",
    ],
)
def test_a_run_is_found_wherever_it_stands(text: str) -> None:
    assert ["torchrun", "--tp", "1"] in read_script(text).commands
