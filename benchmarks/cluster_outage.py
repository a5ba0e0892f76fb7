"""Trials go on while the MLflow server is away; their records arrive later, once and in order."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from cluster_chaos import TUNER, chaos_job, end_processes, free_port, start_server

_BEFORE = 2
"""Trials that end before the server goes away."""
_TRIAL_S = 15.0


def measure(folder: Path, trials: int, outage_s: float) -> dict[str, Any]:
    """Run a study of `trials` simulated trials whose server is away for `outage_s` of it."""
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    job, study = folder / "job.yaml", folder / "study"
    job.write_text(yaml.safe_dump(_job(trials, uri)))
    server = start_server(folder, port)
    driver = subprocess.Popen(
        [*TUNER, "tune", str(job), "--study", str(study)], stdout=subprocess.DEVNULL
    )
    try:
        while _ended(study) < _BEFORE:
            _require(driver.poll() is None, "the study ended before the outage")
            time.sleep(0.2)
        end_processes(server)
        away_from, before = time.time(), _ended(study)
        time.sleep(outage_s)
        during = _ended(study) - before
        _require(driver.poll() is None, "the study ended during the outage: more --trials")
        away_to = time.time()
        server = start_server(folder, port)
        driver.wait()
        return {
            "trials": trials,
            "outage_s": round(away_to - away_from, 1),
            "trials_ended_while_away": during,
            "driver_exit_code": driver.returncode,
            **_arrived(uri, study, away_from, away_to),
        }
    finally:
        end_processes(driver)
        end_processes(server)


def _job(trials: int, uri: str) -> dict[str, Any]:
    document = chaos_job(trials, uri)
    del document["cluster"]["memory_limit_gib"]
    document["space"]["fixed"] = {"env": {"SIMULATED_SPEEDUP": str(30.0 / _TRIAL_S)}}
    document["trainable"] = {"name": "simulated", "timeout_s": 900}
    return document


def _ended(study: Path) -> int:
    return len(list(study.glob("trials/*/result.json")))


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise SystemExit(otherwise)


def _arrived(uri: str, study: Path, away_from: float, away_to: float) -> dict[str, Any]:
    """What the server holds of the study, against the study's own summary."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("megatron-tuner").experiment_id
    found = client.search_runs([experiment], max_results=5000)
    runs = {int(r.data.tags["tuner.trial"]): r for r in found if "tuner.trial" in r.data.tags}
    numbers = Counter(r.data.tags["tuner.trial"] for r in found if "tuner.trial" in r.data.tags)
    summary = json.loads((study / "summary.json").read_text())
    wanted = {trial["number"]: trial for trial in summary["trials"]}
    values = {
        number: [m.value for m in client.get_metric_history(run.info.run_id, "step_time_s")]
        for number, run in runs.items()
    }
    lines = (study / "mlflow-spool.jsonl").read_text().splitlines()
    noted = [json.loads(line) for line in lines]
    ended_away = [
        number
        for number, run in runs.items()
        if away_from * 1000 <= run.info.end_time <= away_to * 1000
    ]
    return {
        "trials_of_the_study": len(wanted),
        "runs_missing": sorted(wanted.keys() - runs.keys()),
        "runs_twice": sum(count - 1 for count in numbers.values()),
        "runs_unended": sum(run.info.status == "RUNNING" for run in found),
        "figures_twice_or_wrong": [
            number
            for number, trial in wanted.items()
            if trial["measured"] and values.get(number) != [trial["measured"]["step_time_s"]]
        ],
        "runs_with_an_end_inside_the_outage": len(ended_away),
        "records": len(noted),
        "records_sent": json.loads((study / "mlflow-spool.sent.json").read_text())["sent"],
        "runs_made_in_the_order_of_the_records": _in_order(noted, runs),
    }


def _in_order(noted: list[dict[str, Any]], runs: dict[int, Any]) -> bool:
    """Whether runs start when their records say, one after the other."""
    started = [(r["number"], r["time_ms"]) for r in noted if r["kind"] == "start"]
    times = [runs[number].info.start_time for number, _ in started if number in runs]
    return times == sorted(times) and times == [ms for n, ms in started if n in runs]
