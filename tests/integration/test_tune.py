"""`tuner tune` with real Ray, Optuna storage, MLflow store and multi-process Megatron-Core."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import psutil
import pytest
import yaml
from mlflow import MlflowClient

pytestmark = pytest.mark.slow

TUNER = [sys.executable, "-c", "from tuner.cli import main; main()"]
GIB = 2**30
JOB = {
    "name": "small",
    "model": "tiny-dense",
    "cluster": {"device": "cpu", "gpus_per_node": 2},
    "workload": {"seq_length": 64, "global_batch_size": 8, "precision": "fp32"},
    "space": {
        "axes": {
            "tensor_model_parallel_size": [1, 2, 3],
            "micro_batch_size": [1, 4],
            "sequence_parallel": {"values": [True], "when": {"tensor_model_parallel_size": 2}},
            "recompute_granularity": [None, "full"],
            "recompute_method": {"values": ["uniform"], "when": {"recompute_granularity": "full"}},
            "recompute_num_layers": {"values": [1], "when": {"recompute_granularity": "full"}},
        }
    },
    "search": {"sampler": "random", "start": [{"tensor_model_parallel_size": 1}]},
    "budget": {"trials": 4},
    "trainable": {"warmup_steps": 2, "measure_steps": 2, "timeout_s": 120},
}


def write_job(folder: Path, **changes) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**JOB, **changes}))
    return path


def tuner(*arguments, expect=0, timeout=400):
    done = subprocess.run(
        [*TUNER, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def optuna_trials(study: Path):
    return optuna.load_study(study_name="tuner", storage=f"sqlite:///{study}/study.db").trials


def mlflow_runs(study: Path, uri: str | None = None):
    client = MlflowClient(tracking_uri=uri or f"sqlite:///{study}/mlflow.db")
    experiment = client.get_experiment_by_name("megatron-tuner")
    return client.search_runs([experiment.experiment_id], max_results=1000)


def processes_of(study: Path):
    """Processes whose command line or working folder names the study."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(study) in " ".join(process.cmdline()) and process.pid != os.getpid():
                found.append(process)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished study under a memory limit that candidates without recompute break."""
    folder = tmp_path_factory.mktemp("finished")
    probe = folder / "probe"
    tuner("tune", write_job(folder, budget={"trials": 1}), "--study", probe)
    peak = json.loads((probe / "summary.json").read_text())["trials"][0]["measured"][
        "peak_memory_allocated_bytes"
    ]
    limited = {**JOB["cluster"], "memory_limit_gib": (peak - 1) / GIB}
    study = folder / "study"
    done = tuner("tune", write_job(folder, cluster=limited), "--study", study, "--format", "json")
    return study, json.loads(done.stdout), peak


def test_the_command_prints_the_summary_that_the_study_keeps(finished):
    study, printed, _ = finished
    assert printed == json.loads((study / "summary.json").read_text())
    assert printed["counts"]["trials"] == 4
    assert printed["ended_because"] == "budget spent"


def test_the_best_is_the_best_feasible_trial_and_the_limit_bites(finished):
    study, summary, peak = finished
    first = summary["trials"][0]
    assert first["outcome"] == "oom"
    assert first["measured"]["peak_memory_allocated_bytes"] == peak
    assert "GiB" in first["reason"]
    feasible = [t for t in summary["trials"] if t["outcome"] == "completed"]
    best = max(feasible, key=lambda t: t["measured"]["tflops_per_gpu"])
    assert summary["best"] == best["number"]
    assert all(t["measured"]["peak_memory_allocated_bytes"] < peak for t in feasible)
    document = yaml.safe_load((study / "best.yaml").read_text())
    assert document["config"] == best["config"]
    assert document["measured"]["trial"] == best["number"]


def attributes(trial: optuna.trial.FrozenTrial) -> dict:
    """What the study knows of a trial: noted when it was proposed, and when it ended."""
    return {**trial.user_attrs["trial"], **trial.user_attrs.get("result", {})}


def test_summary_optuna_and_mlflow_hold_the_same_figures(finished):
    study, summary, _ = finished
    stored = {t.number: t for t in optuna_trials(study)}
    runs = {
        int(run.data.tags["tuner.trial"]): run
        for run in mlflow_runs(study)
        if "tuner.trial" in run.data.tags
    }
    assert set(runs) == {t["number"] for t in summary["trials"]}
    for trial in summary["trials"]:
        attrs, run = attributes(stored[trial["number"]]), runs[trial["number"]]
        assert attrs["outcome"] == run.data.tags["outcome"] == trial["outcome"]
        assert attrs["candidate"] == trial["config"]
        shown = {k: str(v) for k, v in trial["config"].items() if not isinstance(v, list)}
        assert shown.items() <= run.data.params.items()
        for name in ("tflops_per_gpu", "tokens_per_s_per_gpu", "step_time_s"):
            assert attrs["measurement"][name] == trial["measured"][name] == run.data.metrics[name]
        peak = trial["measured"]["peak_memory_allocated_bytes"]
        assert run.data.metrics["peak_memory_allocated_gib"] * GIB == peak
        assert run.info.status in ("FINISHED", "FAILED")


def test_rejected_candidates_are_in_the_study_with_their_rule_and_never_ran(finished):
    study, summary, _ = finished
    pruned = [t for t in optuna_trials(study) if t.state is optuna.trial.TrialState.PRUNED]
    assert len(pruned) == summary["counts"]["rejected"]
    for trial in pruned:
        assert attributes(trial)["rule"] in summary["rejected_by_rule"]
        assert not (study / "trials" / f"{trial.number:04d}").exists()


def test_trial_runs_are_children_of_the_study_run(finished):
    study, _, _ = finished
    runs = mlflow_runs(study)
    parents = [r for r in runs if r.data.tags.get("tuner.kind") == "study"]
    assert len(parents) == 1
    children = {r.data.tags.get("mlflow.parentRunId") for r in runs if r not in parents}
    assert children == {parents[0].info.run_id}
    assert parents[0].info.status == "FINISHED"


def test_the_best_candidate_run_alone_has_the_same_peak_to_the_byte(finished, tmp_path):
    study, _, _ = finished
    document = yaml.safe_load((study / "best.yaml").read_text())
    done = tuner("run", study / "best.yaml", "--output", tmp_path / "run", "--format", "json")
    again = json.loads(done.stdout)["measurement"]
    measured = document["measured"]
    assert again["peak_memory_allocated_bytes"] == measured["peak_memory_allocated_bytes"]
    assert 0.2 < again["step_time_s"] / measured["step_time_s"] < 5


def test_the_best_candidate_passes_tuner_check(finished):
    study, _, _ = finished
    tuner("check", study / "best.yaml")


def test_nothing_of_a_finished_study_is_left_running(finished):
    study, _, _ = finished
    assert processes_of(study) == []


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)


def launched(study: Path) -> list[Path]:
    """Folders of the trials whose ranks have begun to write their logs, in order."""
    folders = sorted((study / "trials").glob("*")) if study.exists() else []
    return [folder for folder in folders if any(folder.rglob("*.log"))]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_study_is_consistent_and_resumes_where_it_was(tmp_path, stop):
    study = tmp_path / "study"
    only_valid = {"axes": {"micro_batch_size": [1, 2, 4]}}
    job = write_job(tmp_path, space=only_valid, search={"sampler": "random"}, budget={"trials": 3})
    command = [*TUNER, "tune", str(job), "--study", str(study)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(launched(study)) == 2)
    finished_first = (study / "trials" / "0000" / "result.json").read_text()
    running.send_signal(stop)
    _, errors = running.communicate(timeout=60)

    assert running.returncode == 130, errors
    assert f"tuner tune --resume {study}" in errors
    assert "Traceback" not in errors
    wait_for(lambda: not processes_of(study), seconds=30)
    assert all(t.state.is_finished() for t in optuna_trials(study))
    assert all(r.info.status != "RUNNING" for r in mlflow_runs(study))
    summary = json.loads((study / "summary.json").read_text())
    assert summary["ended_because"] == "interrupted"
    assert [t["outcome"] for t in summary["trials"]] == ["completed", "interrupted"]

    tuner("tune", "--resume", study)
    summary = json.loads((study / "summary.json").read_text())
    outcomes = [t["outcome"] for t in summary["trials"]]
    assert outcomes == ["completed", "interrupted", "completed", "completed"]
    assert summary["trials"][2]["config"] == summary["trials"][1]["config"]
    assert (study / "trials" / "0000" / "result.json").read_text() == finished_first
    runs = mlflow_runs(study)
    assert len(runs) == 5
    assert sum(r.data.tags.get("tuner.kind") == "study" for r in runs) == 1


@pytest.mark.parametrize("moment", ["gcs_server", "raylet"])
def test_a_stop_while_ray_starts_ends_in_order_and_leaves_nothing(tmp_path, moment):
    study = tmp_path / "study"
    command = [*TUNER, "tune", str(write_job(tmp_path)), "--study", str(study)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    family = psutil.Process(running.pid)
    wait_for(lambda: any(moment in p.name() for p in family.children(recursive=True)))
    started = family.children(recursive=True)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=90)

    assert running.returncode == 130, errors
    assert "Traceback" not in errors
    assert psutil.wait_procs(started, timeout=30)[1] == []
    assert all(r.info.status == "KILLED" for r in mlflow_runs(study))
    summary = json.loads((study / "summary.json").read_text())
    assert (summary["ended_because"], summary["trials"]) == ("interrupted", [])


def test_trials_that_take_too_long_are_outcomes_and_the_answer_is_no(tmp_path):
    hurried = {**JOB["trainable"], "timeout_s": 1.0}
    job = write_job(tmp_path, trainable=hurried, budget={"trials": 2})
    study = tmp_path / "study"
    tuner("tune", job, "--study", study, expect=1)
    summary = json.loads((study / "summary.json").read_text())
    assert [t["outcome"] for t in summary["trials"]] == ["timeout", "timeout"]
    assert all(t["reason"] for t in summary["trials"])
    assert summary["best"] is None
    assert not (study / "best.yaml").exists()


def test_small_trials_run_side_by_side(tmp_path):
    one_rank = {"axes": {"micro_batch_size": [1, 2]}, "fixed": {"world_size": 1}}
    job = write_job(
        tmp_path,
        space=one_rank,
        search={},
        budget={"trials": 2},
        trainable={**JOB["trainable"], "max_concurrent": 2},
    )
    study = tmp_path / "study"
    tuner("tune", job, "--study", study)
    runs = [r for r in mlflow_runs(study) if "tuner.trial" in r.data.tags]
    assert {r.data.params["world_size"] for r in runs} == {"1"}
    first, second = sorted(runs, key=lambda r: r.info.start_time)
    assert second.info.start_time < first.info.end_time


def test_a_trial_spans_the_nodes_of_a_running_cluster(tmp_path):
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=2, include_dashboard=False)
        job = write_job(
            tmp_path,
            cluster={"device": "cpu", "nodes": 2, "gpus_per_node": 2},
            space={"axes": {"pipeline_model_parallel_size": [2]}},
            search={},
            budget={"trials": 1},
        )
        study = tmp_path / "study"
        tuner("tune", job, "--study", study, "--address", nodes.address)
    finally:
        nodes.shutdown()
    summary = json.loads((study / "summary.json").read_text())
    assert [t["outcome"] for t in summary["trials"]] == ["completed"]
    result = json.loads((study / "trials" / "0000" / "result.json").read_text())
    assert [r["rank"] for r in result["measurement"]["ranks"]] == [0, 1, 2, 3]


def test_a_cluster_without_the_resources_is_refused_before_anything_waits(tmp_path):
    job = write_job(tmp_path, cluster={"device": "cuda", "gpus_per_node": 8}, search={})
    done = tuner("tune", job, "--study", tmp_path / "study", expect=3)
    assert "GPU" in done.stderr


def test_an_mlflow_server_that_is_not_there_is_said_so(tmp_path):
    job = write_job(tmp_path, tracking={"uri": "http://127.0.0.1:9"})
    done = tuner("tune", job, "--study", tmp_path / "study", expect=3)
    assert "MLflow" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("tuner:")]) == 1
