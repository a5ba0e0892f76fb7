"""What a study leaves in MLflow, seen as people see it: a real server with passwords, a browser."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from headless import SCREENSHOTS, chromium
from synthetic_study import METRIC, WORLD_SIZE, make_records, make_study

pytestmark = pytest.mark.slow
USER, PASSWORD = "admin", "a long password 1"
TRIALS = 6
EXPERIMENT = "dashboard"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A tracking server that asks for a name and a password; gives its address."""
    folder = tmp_path_factory.mktemp("mlflow")
    settings = folder / "auth.ini"
    settings.write_text(
        "[mlflow]\ndefault_permission = READ\n"
        f"database_uri = sqlite:///{folder}/auth.db\n"
        f"admin_username = {USER}\nadmin_password = {PASSWORD}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"]
    command += ["--artifacts-destination", str(folder / "artifacts"), "--port", str(port)]
    environment = {
        **os.environ,
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "for this test",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(f"{address}/health", process, folder / "log")
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_until_sent(study: Path) -> None:
    """Wait for every record of a study to be at the server."""
    count = len((study / "mlflow-spool.jsonl").read_text().splitlines())
    deadline = time.monotonic() + 240
    while json.loads((study / "mlflow-spool.sent.json").read_text())["sent"] < count:
        assert time.monotonic() < deadline, "the records did not arrive"
        time.sleep(0.5)


def _wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).read()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def client(server):
    from mlflow import MlflowClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_USERNAME", USER)
        patch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
        yield MlflowClient(server, server)


@pytest.fixture(scope="module")
def run_ids(client, server, tmp_path_factory) -> list[str]:
    """Two studies of one job, recorded through the server; ids of their parent runs."""
    from tuner.report import hand_over
    from tuner.tracking.mlflow_records import open_records

    found = []
    for seed in (0, 1):
        trials = make_records(TRIALS, seed)
        directory = make_study(tmp_path_factory.mktemp("studies") / "synthetic", trials)
        best = max((t for t in trials if t.measurement), key=lambda t: t.measurement.tflops_per_gpu)
        document = {"model": "llama3-70b", "config": best.candidate.to_flat()}
        directory.best_path.write_text(yaml.safe_dump({**document, "world_size": WORLD_SIZE}))
        handed = hand_over(directory)
        records = open_records(
            server,
            EXPERIMENT,
            study_id=directory.study_id,
            name=f"study {seed}",
            study_dir=directory.path,
        )
        for trial in trials:
            records.start_trial(trial.number, trial.candidate, WORLD_SIZE)
            records.end_trial(trial, WORLD_SIZE)
        figures = {f"best_{METRIC}": best.measurement.tflops_per_gpu}
        records.finish("FINISHED", figures, handed.paths, note=handed.note, model="synthetic")
        _wait_until_sent(directory.path)
        records.close()
        experiment = client.get_experiment_by_name(EXPERIMENT)
        runs = client.search_runs(
            [experiment.experiment_id],
            f"tags.`tuner.study_id` = '{directory.study_id}' and tags.`tuner.kind` = 'study'",
        )
        found.append(runs[0].info.run_id)
    return found


def test_a_run_tells_what_won_and_carries_every_form(client, run_ids) -> None:
    run = client.get_run(run_ids[0])
    assert run.info.status == "FINISHED"
    assert "### What won" in run.data.tags["mlflow.note.content"]
    files = {item.path for item in client.list_artifacts(run_ids[0])}
    assert {"report.html", "exports"} <= files
    forms = {Path(item.path).stem for item in client.list_artifacts(run_ids[0], "exports")}
    assert forms == {"bridge-cli", "bridge-yaml", "bridge-python", "megatron-args", "yaml"}


def test_the_best_configuration_of_the_latest_study_has_the_alias(client, run_ids) -> None:
    version = client.get_model_version_by_alias("synthetic", "best")
    assert version.run_id == run_ids[-1]
    assert len(client.search_model_versions("name = 'synthetic'")) == 2


def test_a_trial_has_series_ranks_and_the_errors_of_its_estimate(client, run_ids) -> None:
    experiment = client.get_experiment_by_name(EXPERIMENT)
    trials = client.search_runs(
        [experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{run_ids[0]}'"
    )
    assert len(trials) == TRIALS
    done = next(t for t in trials if t.data.tags["outcome"] == "completed")
    figures = done.data.metrics
    error = figures["expected_step_time_s"] / figures["step_time_s"] - 1.0
    assert figures["step_time_error"] == pytest.approx(error)
    peaks = client.get_metric_history(done.info.run_id, "rank_peak_memory_allocated_gib")
    assert [one.step for one in peaks] == list(range(WORLD_SIZE))
    assert len(client.get_metric_history(done.info.run_id, "loss")) == 7
    assert done.data.params["tensor_model_parallel_size"].isdigit()


def test_nobody_reads_it_without_a_password(server, run_ids) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server}/api/2.0/mlflow/runs/get?run_id={run_ids[0]}", timeout=30)
    assert refused.value.code == 401


@pytest.fixture(scope="module")
def page(server, client, run_ids):
    with chromium() as browser:
        context = browser.new_context(
            viewport={"width": 1600, "height": 1000},
            http_credentials={"username": USER, "password": PASSWORD},
        )
        context.set_default_timeout(120_000)
        opened = context.new_page()
        opened.experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
        yield opened
        context.close()


def test_the_table_of_trials_sorts_by_a_metric(page, server, client) -> None:
    order = f"orderByKey=metrics.%60{METRIC}%60&orderByAsc=false"
    page.goto(f"{server}/#/experiments/{page.experiment}/runs?{order}")
    links = page.get_by_role("link", name=re.compile(r"^trial \d{4}:"))
    links.first.wait_for()
    page.screenshot(path=SCREENSHOTS / "dashboard-trials.png")
    trials = client.search_runs([page.experiment], "tags.outcome = 'completed'")
    best = max(trials, key=lambda run: run.data.metrics[METRIC])
    assert links.first.inner_text().strip() == best.info.run_name


def test_runs_of_two_studies_are_compared(page, server, run_ids) -> None:
    chosen = ",".join(f"%22{run_id}%22" for run_id in run_ids)
    page.goto(f"{server}/#/compare-runs?runs=[{chosen}]&experiments=[%22{page.experiment}%22]")
    page.get_by_text("study 0").first.wait_for()
    page.get_by_text("study 1").first.wait_for()
    page.screenshot(path=SCREENSHOTS / "dashboard-compare.png")


def test_a_run_shows_its_note(page, server, run_ids) -> None:
    page.goto(f"{server}/#/experiments/{page.experiment}/runs/{run_ids[0]}")
    page.get_by_text("What won").first.wait_for()
    page.screenshot(path=SCREENSHOTS / "dashboard-run.png")


def test_the_report_opens_from_the_artifacts_with_its_pareto_chart(page, server, run_ids) -> None:
    page.goto(f"{server}/#/experiments/{page.experiment}/runs/{run_ids[0]}/artifacts/report.html")
    frame = page.frame_locator("iframe").first
    chart = frame.get_by_role("img", name="against peak memory")
    chart.wait_for()
    chart.scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / "dashboard-report.png")
