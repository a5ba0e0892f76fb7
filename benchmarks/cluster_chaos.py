"""Real Megatron-Core trials on the CPU while processes are killed and stopped around them.

The same job runs calmly first: the figures that do not depend on the clock (losses, peak memory)
must be the same. The MLflow server goes away and comes back, and the driver is killed and resumed,
once or more.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import yaml

TUNER = [sys.executable, "-c", "from tuner.cli import main; main()"]
_STRIKE_EVERY_S = (6.0, 14.0)
_LEAK_WAIT_S = 60.0
STRIKES = ("rank", "rank", "launcher", "agent", "stop", "driver", "mlflow")


def measure(folder: Path, trials: int, seed: int = 0) -> dict[str, Any]:
    """Run the job calmly and under attack; outcomes, differences and what was left behind."""
    since = time.time()
    job = folder / "job.yaml"
    job.write_text(yaml.safe_dump(chaos_job(trials, None)))
    calm = folder / "calm"
    subprocess.run([*TUNER, "tune", str(job), "--study", str(calm)], check=False)

    port = free_port()
    job.write_text(yaml.safe_dump(chaos_job(trials, f"http://127.0.0.1:{port}")))
    attack = _Attack(folder, job, port, random.Random(seed))
    started = time.monotonic()
    attack.run()
    seconds = time.monotonic() - started
    left = _left_behind(folder, since)
    return {
        "trials": trials,
        "seconds": round(seconds, 1),
        "strikes": dict(attack.strikes),
        "resumes": attack.resumes,
        **_compared(_trials(calm), _trials(attack.study)),
        **_mlflow(attack, port),
        "left_behind": left,
    }


def chaos_job(trials: int, uri: str | None) -> dict[str, Any]:
    """Small candidates, some of which do not fit; no racing, so that calm figures are complete."""
    return {
        "name": "chaos",
        "model": "tiny-dense",
        "cluster": {"device": "cpu", "gpus_per_node": 2, "memory_limit_gib": 0.02},
        "workload": {"seq_length": 64, "global_batch_size": 8, "precision": "fp32"},
        "space": {
            "axes": {
                "world_size": [1, 2],
                "tensor_model_parallel_size": [1, 2],
                "micro_batch_size": [1, 2, 4],
                "sequence_parallel": {
                    "values": [False, True],
                    "when": {"tensor_model_parallel_size": 2},
                },
                "recompute_granularity": [None, "full"],
                "recompute_method": {
                    "values": ["uniform", "block"],
                    "when": {"recompute_granularity": "full"},
                },
                "recompute_num_layers": {
                    "values": [1, 2],
                    "when": {"recompute_granularity": "full"},
                },
            }
        },
        "search": {"sampler": "random", "race": False},
        "budget": {"trials": trials, "stop_when_unlikely": False},
        "trainable": {"warmup_steps": 2, "measure_steps": 1, "timeout_s": 900, "hang_after_s": 20},
        "tracking": {} if uri is None else {"uri": uri},
    }


class _Attack:
    """Runs the study and strikes at random until it has completed."""

    def __init__(self, folder: Path, job: Path, port: int, generator: random.Random) -> None:
        self.study = folder / "attacked"
        self.strikes: Counter[str] = Counter()
        self.resumes = 0
        self._folder, self._job, self._port = folder, job, port
        self._random = generator
        self._server = start_server(folder, port)

    def run(self) -> None:
        driver = self._tune("tune", str(self._job), "--study", str(self.study))
        try:
            while True:
                time.sleep(self._random.uniform(*_STRIKE_EVERY_S))
                if driver.poll() is not None:
                    if driver.returncode == 0:
                        return
                    self.resumes += 1
                    driver = self._tune("tune", "--resume", str(self.study))
                    continue
                self._strike(self._random.choice(STRIKES), driver)
        finally:
            end_processes(driver)
            self._up()
            # Sends what the server has missed, as the driver says where it ends without one.
            self._tune("tune", "--resume", str(self.study)).wait()

    def stop(self) -> None:
        """End the MLflow server."""
        end_processes(self._server)

    def _tune(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*TUNER, *arguments], stdout=subprocess.DEVNULL)

    def _strike(self, what: str, driver: subprocess.Popen[bytes]) -> None:
        if what in ("driver", "mlflow") and not (self.study / "mlflow.json").exists():
            return  # it is still making the study
        if what == "driver":
            driver.kill()
            driver.wait()
            self.strikes["driver"] += 1
            return
        if what == "mlflow":
            if self._server.poll() is None:
                end_processes(self._server)
                self.strikes["mlflow down"] += 1
            else:
                self._up()
            return
        found = [process for process in _family(driver.pid) if _role(process) == _VICTIM[what]]
        if found:
            with contextlib.suppress(psutil.Error):
                victim = self._random.choice(found)
                victim.send_signal(signal.SIGSTOP if what == "stop" else signal.SIGKILL)
                self.strikes[what] += 1

    def _up(self) -> None:
        if self._server.poll() is not None:
            self._server = start_server(self._folder, self._port)


def start_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """An MLflow server that keeps its store in `folder`; returns once it answers."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    _wait_for_port(port)
    return server


_VICTIM = {"rank": "rank", "stop": "rank", "launcher": "launcher", "agent": "agent"}


def _role(process: psutil.Process) -> str | None:
    """What a process of the study is: template, launcher and rank are forks of one program."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        if words and words[0].startswith("ray::NodeAgent"):
            return "agent"
        if "trainables.template" not in words:
            return None
        depth, parent = 0, process.parent()
        while parent is not None and "trainables.template" in parent.cmdline():
            depth, parent = depth + 1, parent.parent()
        return ("template", "launcher", "rank")[min(depth, 2)]
    return None


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _trials(study: Path) -> list[dict[str, Any]]:
    summary = json.loads((study / "summary.json").read_text())
    for trial in summary["trials"]:
        result = study / "trials" / f"{trial['number']:04d}" / "result.json"
        measured = json.loads(result.read_text())["measurement"] if result.exists() else None
        trial["losses"] = None if measured is None else measured["losses"]
    return list(summary["trials"])


def _compared(calm: list[dict[str, Any]], attacked: list[dict[str, Any]]) -> dict[str, Any]:
    """Outcomes of both, and candidates whose clock-free figures differ."""

    def figures(trial: dict[str, Any]) -> tuple[Any, ...]:
        measured = trial["measured"] or {}
        return trial["outcome"], measured.get("peak_memory_allocated_bytes"), trial["losses"]

    by_config = {json.dumps(t["config"], sort_keys=True): figures(t) for t in calm}
    ended = [t for t in attacked if t["outcome"] != "interrupted"]
    keys = [json.dumps(t["config"], sort_keys=True) for t in ended]
    shared = [(key, t) for key, t in zip(keys, ended, strict=True) if key in by_config]
    different = [t["number"] for key, t in shared if by_config[key] != figures(t)]
    return {
        "calm_outcomes": dict(Counter(t["outcome"] for t in calm)),
        "outcomes": dict(Counter(t["outcome"] for t in attacked)),
        "candidates_run_twice_to_an_end": len(keys) - len(set(keys)),
        "compared_with_calm": len(shared),
        "different_from_calm": different,
    }


def _mlflow(attack: _Attack, port: int) -> dict[str, Any]:
    """Runs the server has for the study, once the last records have arrived."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"http://127.0.0.1:{port}")
    experiment = client.get_experiment_by_name("megatron-tuner").experiment_id
    runs = client.search_runs([experiment], max_results=1000)
    attack.stop()
    numbers = Counter(r.data.tags["tuner.trial"] for r in runs if "tuner.trial" in r.data.tags)
    return {
        "mlflow_trials": len(numbers),
        "mlflow_duplicates": sum(count - 1 for count in numbers.values()),
        "mlflow_running": sum(run.info.status == "RUNNING" for run in runs),
    }


def _left_behind(folder: Path, since: float) -> dict[str, list[str]]:
    """Processes and shared memory of the studies, started at `since`, a while after their end."""
    deadline = time.monotonic() + _LEAK_WAIT_S
    while True:
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                mine = str(folder) in words and "mlflow" not in words
                if (mine and process.pid != os.getpid()) or (
                    _role(process) is not None and process.ppid() == 1
                ):
                    processes.append(f"{process.pid} {words[:80]}")
        if not processes or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    memory = [
        p.name
        for p in Path("/dev/shm").iterdir()
        # A killed MLflow server leaves folders there, which are not the study's.
        if p.stat().st_uid == os.getuid() and not p.is_dir() and p.stat().st_ctime >= since
    ]
    return {"processes": processes, "shared_memory": memory}


def end_processes(process: subprocess.Popen[bytes]) -> None:
    for member in [*_family(process.pid), process]:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            member.kill()
    process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.5)
    raise SystemExit("the MLflow server did not start")
