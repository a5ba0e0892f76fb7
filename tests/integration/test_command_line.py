"""The command as scripts and people use it: contracts, exit codes, errors, start-up time."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TUNER = [sys.executable, "-c", "from tuner.cli import main; main()"]
VALID = {
    "model": "llama3-8b",
    "world_size": 8,
    "seq_length": 4096,
    "global_batch_size": 32,
    "config": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


def tuner(*arguments, cwd=None, stdin=None):
    return subprocess.run(
        [*TUNER, *map(str, arguments)],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def written(folder: Path, document, name="config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(document))
    return path


def invalid():
    return {**VALID, "config": {"tensor_model_parallel_size": 3}}


@pytest.mark.parametrize(("document", "code"), [(VALID, 0), (invalid(), 1)])
def test_check_prints_one_json_document_and_its_exit_code_is_the_answer(tmp_path, document, code):
    done = tuner("check", written(tmp_path, document), "--format", "json")
    assert done.returncode == code
    answer = json.loads(done.stdout)
    assert answer["valid"] is (code == 0)
    for violation in answer["violations"]:
        assert set(violation) == {"rule", "kind", "fields", "message", "fix", "reference"}


def test_check_answers_each_line_of_a_file_in_order(tmp_path):
    path = tmp_path / "many.jsonl"
    lines = [json.dumps(VALID), json.dumps(invalid()), "not json", "[1]", json.dumps(VALID)]
    path.write_text("\n".join(lines) + "\n")
    done = tuner("check", "--jsonl", path)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [a["valid"] for a in answers] == [True, False, False, False, True]
    assert "input_error" in answers[2]
    assert "input_error" in answers[3]
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_check_takes_a_file_from_standard_input():
    done = tuner("check", "--jsonl", "-", stdin=json.dumps(VALID) + "\n")
    assert json.loads(done.stdout)["valid"] is True


def test_check_says_in_text_what_is_wrong_and_what_to_change(tmp_path):
    done = tuner("check", written(tmp_path, invalid()))
    assert "invalid" in done.stdout
    assert "tensor" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "none.yaml"], ["none.yaml", "no such file"]),
        (["check", "list.yaml"], ["list.yaml", "mapping"]),
        (["check"], ["CONFIG"]),
        (["check", "model.yaml"], ["model.yaml", "llama3-8b"]),
        (["check", "good.json", "--mcore", "9.9"], ["9.9"]),
        (["check", "good.json", "--frontend", "brigde"], ["did you mean 'bridge'"]),
        (["tune"], ["JOB"]),
        (["tune", "none.yaml"], ["none.yaml", "no such file"]),
        (["tune", "--resume", "."], ["not a study directory"]),
        (["tune", "typo.yaml"], ["typo.yaml", "'gpus_per_nod'", "did you mean 'gpus_per_node'"]),
        (["tune", "no-model.yaml"], ["no-model.yaml", "model", "lama"]),
        (["tune", "impossible.yaml"], ["impossible.yaml", "space"]),
        (["tune", "hf.yaml"], ["hf.yaml", "model", "missing.json"]),
        (["tune", "start.yaml"], ["search.start[0]"]),
        (["run", "list.yaml"], ["mapping"]),
        (["run", "model.yaml"], ["model.yaml"]),
    ],
)
def test_bad_input_is_one_line_exit_code_two_and_leaves_nothing(tmp_path, arguments, words):
    job = {
        "name": "x",
        "model": "tiny-dense",
        "cluster": {"device": "cpu", "gpus_per_node": 4},
        "workload": {"seq_length": 64, "global_batch_size": 8, "precision": "fp32"},
        "space": {"includes": ["cpu"]},
    }
    written(tmp_path, VALID, "good.json")
    (tmp_path / "list.yaml").write_text("- 1\n")
    written(tmp_path, {**VALID, "model": "lama3-8b"}, "model.yaml")
    written(tmp_path, {**job, "cluster": {"gpus_per_nod": 4}}, "typo.yaml")
    written(tmp_path, {**job, "model": "lama3-8b"}, "no-model.yaml")
    written(tmp_path, {**job, "model": {"hf_config": "missing.json"}}, "hf.yaml")
    impossible = {"device": "cpu", "gpus_per_node": 3}
    only_two = {"axes": {"tensor_model_parallel_size": [2]}}
    written(tmp_path, {**job, "cluster": impossible, "space": only_two}, "impossible.yaml")
    written(tmp_path, {**job, "search": {"start": [{"micro_batch_size": 64}]}}, "start.yaml")
    before = sorted(os.listdir(tmp_path))

    done = tuner(*arguments, cwd=tmp_path)

    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_a_study_folder_that_cannot_be_made_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    done = tuner("tune", "cpu_quickstart", "--study", tmp_path / "file" / "study")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "cannot be written" in done.stderr


def test_a_misspelt_option_is_bad_input_without_a_traceback():
    done = tuner("check", "--josnl", "x")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_job_schema_is_json_schema():
    done = tuner("job-schema")
    assert json.loads(done.stdout)["properties"]["cluster"]


def best_of_three(*arguments):
    times = []
    for _ in range(3):
        started = time.monotonic()
        tuner(*arguments)
        times.append(time.monotonic() - started)
    return min(times)


def test_help_answers_in_half_a_second_and_check_in_a_second(tmp_path):
    assert best_of_three("--help") < 0.5
    assert best_of_three("check", written(tmp_path, VALID)) < 1.0


@pytest.mark.parametrize(
    ("arguments", "name", "content"),
    [
        (["plan", "--gpu", "h100", "--gpus", "8"], "config.json", b'{"model_type": "llama"}'),
        (["validate"], "rows.jsonl", bytes(range(128, 256))),
        (["calibrate", "fit"], "rows.jsonl", bytes(range(128, 256))),
        (["validate"], "rows.jsonl.gz", b"\x1f\x8b cut short"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_in_one_line(arguments, name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    done = tuner(*arguments, tmp_path / name)
    assert done.returncode == 2, done.stderr
    assert name in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_export_says_what_the_job_will_refuse_and_writes_the_assumed_precision(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "model: llama3-8b\nworld_size: 8\nseq_length: 4096\nglobal_batch_size: 64\n"
        "config: {tensor_model_parallel_size: 2, sequence_parallel: true}\n"
    )
    done = tuner("export", "c.yaml", "--to", "megatron-args", cwd=tmp_path)
    assert "E01" in done.stderr
    assert "--bf16" in done.stdout.split()


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (("check",), "config: {}\nnotes: 5"),
        (
            ("plan", "--gpu", "h100", "--gpus", "2", "--confirm", "0"),
            "config: {optimizer_cpu_offload: true, optimizer_offload_fraction: x}",
        ),
    ],
)
def test_odd_documents_end_without_a_traceback(command, lines, tmp_path):
    model = "model: {base: tiny-gqa}\nseq_length: 64\nglobal_batch_size: 8\n"
    (tmp_path / "odd.yaml").write_text(f"{model}{lines}\n")
    done = tuner(command[0], "odd.yaml", *command[1:], cwd=tmp_path)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1, 2)
