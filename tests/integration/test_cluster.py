"""A study on a Ray cluster of several nodes: its driver, an agent and a node are lost.

Trials are simulated: they hold their nodes for some seconds and compute nothing.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import yaml
from mlflow import MlflowClient

pytestmark = pytest.mark.slow

TUNER = [sys.executable, "-c", "from tuner.cli import main; main()"]
TRIALS = 6
JOB = {
    "name": "losses",
    "model": "tiny-dense",
    "cluster": {"device": "cpu", "nodes": 2, "gpus_per_node": 1, "health_check": False},
    "workload": {"seq_length": 64, "global_batch_size": 64, "precision": "fp32"},
    "space": {
        "axes": {"micro_batch_size": [1, 2, 4, 8, 16, 32]},
        "fixed": {"world_size": 1, "env": {"SIMULATED_SPEEDUP": "5"}},
    },
    "search": {"sampler": "random", "race": False},
    "budget": {"trials": TRIALS, "stop_when_unlikely": False},
    "trainable": {"name": "simulated", "timeout_s": 3000, "max_concurrent": 2},
}


def wait_for(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def finished(study: Path) -> dict[str, str]:
    """Results of the trials that have one, by folder."""
    return {p.parent.name: p.read_text() for p in study.glob("trials/*/result.json")}


def running(study: Path) -> list[Path]:
    return [p for p in study.glob("trials/*") if not (p / "result.json").exists()]


def agents(nodes) -> list[psutil.Process]:
    """Agents on these nodes: other tests may run theirs on this machine at the same time."""
    raylets = {
        started.process.pid for node in nodes for started in node.all_processes.get("raylet", [])
    }
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            name = process.cmdline()[:1]
            if process.ppid() in raylets and name and name[0].startswith("ray::NodeAgent"):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study whose driver was killed, then resumed while an agent was killed and a node lost."""
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("losses")
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    study = folder / "study"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    workers = [nodes.add_node(num_cpus=1) for _ in range(3)]  # one to spare
    at = ["--address", nodes.address]
    try:
        first = subprocess.Popen([*TUNER, "tune", str(folder / "job.yaml"), "--study", study, *at])
        wait_for(lambda: finished(study) and running(study))
        kept = finished(study)
        first.send_signal(signal.SIGKILL)
        first.wait()
        wait_for(lambda: not agents(workers), 60)

        second = subprocess.Popen([*TUNER, "tune", "--resume", study, *at])
        wait_for(lambda: len(finished(study)) > len(kept) and running(study))
        known = agents(workers)
        known[0].kill()
        nodes.remove_node(workers[0])
        assert second.wait(timeout=400) == 0
        left = {process.pid for process in [*known, *agents(workers[1:])] if process.is_running()}
    finally:
        nodes.shutdown()
    return study, kept, left


def test_the_study_completes_and_no_finished_trial_is_lost_or_run_again(study):
    path, kept, _ = study
    summary = json.loads((path / "summary.json").read_text())
    trials = {f"{trial['number']:04d}": trial for trial in summary["trials"]}
    outcomes = Counter(trial["outcome"] for trial in trials.values())
    assert outcomes["completed"] == TRIALS
    assert set(outcomes) <= {"completed", "interrupted"}
    for name, text in kept.items():
        assert (path / "trials" / name / "result.json").read_text() == text
        assert trials[name]["outcome"] == "completed"


def test_every_candidate_has_the_figures_of_a_calm_run(study):
    from trainables.simulated.run import simulated_measurement
    from tuner.measurement import TrialSpec

    path, _, _ = study
    for trial in json.loads((path / "summary.json").read_text())["trials"]:
        if trial["outcome"] == "completed":
            spec = json.loads((path / f"trials/{trial['number']:04d}/spec.json").read_text())
            calm = simulated_measurement(TrialSpec.from_json(spec))
            assert trial["measured"]["step_time_s"] == calm.step_time_s


def test_mlflow_has_every_trial_once_and_nothing_is_left(study):
    path, _, left = study
    client = MlflowClient(tracking_uri=f"sqlite:///{path}/mlflow.db")
    experiment = client.get_experiment_by_name("megatron-tuner")
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    numbers = [run.data.tags["tuner.trial"] for run in runs if "tuner.trial" in run.data.tags]
    trials = json.loads((path / "summary.json").read_text())["trials"]
    assert sorted(map(int, numbers)) == [trial["number"] for trial in trials]
    assert all(run.info.status != "RUNNING" for run in runs)
    assert not left
