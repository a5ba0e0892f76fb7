"""Run one trial in processes of its own and turn every ending into one result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainables.agent import FAILURES_FILE, AgentTask
from trainables.evidence import AGENT_LOG_FILE, failed_result, last_lines
from trainables.failures import RankFailure
from trainables.processes import stop_family, stop_marked
from trainables.progress import Watch
from trainables.stacks import describe_hang
from tuner.measurement import (
    RESULT_FILE,
    SPEC_FILE,
    Outcome,
    TrialResult,
    TrialSpec,
    write_json_atomically,
)

if TYPE_CHECKING:
    from trainables.warm import Template, WarmLauncher

_POLL_S = 0.05


def run_trial(
    spec: TrialSpec,
    output_dir: Path,
    *,
    node_rank: int = 0,
    nnodes: int = 1,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    module: str = "trainables.megatron_core",
    cancel: threading.Event | None = None,
    processes_per_node: int | None = None,
    template: Template | None = None,
    devices: str | None = None,
) -> TrialResult:
    """Run `spec` with one process per rank and return how it ended.

    `module` is run once per rank as `python -m module --spec FILE --output DIR`. With several
    nodes, call this on each with the same spec, address and port; each starts
    `world_size / nnodes` ranks, or `processes_per_node` processes that start the ranks themselves.
    `output_dir` receives the spec, logs, error files and `result.json`. `template` starts the ranks
    warm where it can; `devices` is their CUDA_VISIBLE_DEVICES where they may not have all.

    A failure of the trial is an outcome, not an exception (see `Outcome`): among them timeout
    (`spec.timeout_s`, counted from here) and, when `cancel` is set, interruption.
    KeyboardInterrupt is passed on once all processes are gone. Should this process be killed, the
    trial's processes die with it. Raises ValueError for a world size the nodes cannot share, and
    OSError when `output_dir` cannot be written.
    """
    if spec.world_size % nnodes:
        raise ValueError(f"world_size={spec.world_size} is not a multiple of nnodes={nnodes}")
    if nnodes > 1 and master_port is None:
        raise ValueError("master_port is needed when nnodes > 1")
    started = time.monotonic()
    output_dir = output_dir.resolve()
    output_dir.mkdir(parents=True, exist_ok=True)
    for stale in (RESULT_FILE, FAILURES_FILE):
        (output_dir / stale).unlink(missing_ok=True)
    write_json_atomically(output_dir / SPEC_FILE, spec.to_json())
    task = AgentTask(
        module=module,
        arguments=["--spec", str(output_dir / SPEC_FILE), "--output", str(output_dir)],
        output_dir=str(output_dir),
        ranks_per_node=processes_per_node or spec.world_size // nnodes,
        node_rank=node_rank,
        nnodes=nnodes,
        master_addr=master_addr,
        port=master_port or 0,
    )
    environment = rank_environment(spec, nnodes, devices)
    try:
        stopped = _run(task, spec, environment, cancel, template)
    except BaseException:
        _write_result(TrialResult(Outcome.INTERRUPTED, "stopped from outside"), output_dir, started)
        raise
    result = _ending(stopped, spec, output_dir)
    return _write_result(result, output_dir, started)


@dataclass(frozen=True, slots=True)
class _Stop:
    """Why a launcher was stopped from here."""

    outcome: Outcome
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


class _PlainLauncher:
    """A launcher started as a program of its own, as `WarmLauncher` is one forked."""

    def __init__(self, task: AgentTask, environment: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainables.agent", task.to_argument()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def ended(self, wait_s: float) -> bool | None:
        """Wait at most this long: None while it runs, else whether it ended in order."""
        try:
            return self._process.wait(timeout=wait_s) >= 0
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def _launcher(
    task: AgentTask, environment: Mapping[str, str], template: Template | None
) -> _PlainLauncher | WarmLauncher:
    log = Path(task.output_dir) / AGENT_LOG_FILE
    warm = None if template is None else template.launch(task, environment, log)
    return warm or _PlainLauncher(task, environment, log)


def _follow(
    launcher: _PlainLauncher | WarmLauncher,
    spec: TrialSpec,
    watch: Watch | None,
    deadline: float,
    cancel: threading.Event | None,
) -> _Stop | None:
    """Wait for the launcher's end. Why it has to be stopped, or how it vanished; else None."""
    while True:
        ended = launcher.ended(_POLL_S)
        if ended is not None:
            return None if ended else _Stop(Outcome.KILLED, "the launcher was killed")
        if cancel is not None and cancel.is_set():
            return _Stop(Outcome.INTERRUPTED, "cancelled")
        if time.monotonic() > deadline:
            return _Stop(Outcome.TIMEOUT, f"not finished after timeout_s={spec.timeout_s:g}")
        stalled = None if watch is None else watch.stalled()
        if watch is not None and stalled is not None:
            evidence = describe_hang(launcher.pid, watch.path.parent)
            return _Stop(Outcome.HUNG, stalled, evidence)


def _run(
    task: AgentTask,
    spec: TrialSpec,
    environment: Mapping[str, str],
    cancel: threading.Event | None,
    template: Template | None,
) -> _Stop | None:
    """Run the launcher to its end, or stop it; no process of the trial is left afterwards."""
    deadline = time.monotonic() + spec.timeout_s
    watch = None
    if spec.hang_after_s is not None:
        watch = Watch.start(Path(task.output_dir), task.node_rank, spec.hang_after_s)
    launcher = _launcher(task, environment, template)
    try:
        return _follow(launcher, spec, watch, deadline, cancel)
    finally:
        stop_family(launcher.pid)
        launcher.close()
        stop_marked(launcher.pid)


def rank_environment(spec: TrialSpec, nnodes: int, devices: str | None = None) -> dict[str, str]:
    """This process's environment with what ranks need; the candidate's `env` wins."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    if spec.device == "cuda":
        # Orders communication kernels before the computation they overlap with
        # (tensor_parallel/layers.py warns without it).
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if nnodes == 1 and sys.platform == "linux":
            # Gloo otherwise resolves the host's name, which a laptop may not know.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for chosen in (spec.options.get("environment"), spec.config.get("env")):
        environment.update({name: str(value) for name, value in (chosen or {}).items()})
    return environment


def _ending(stopped: _Stop | None, spec: TrialSpec, output_dir: Path) -> TrialResult:
    failures_file, result_file = output_dir / FAILURES_FILE, output_dir / RESULT_FILE
    if failures_file.exists():
        entries = json.loads(failures_file.read_text())
        failures = [RankFailure.from_json(entry) for entry in entries]
        return failed_result(failures, output_dir, spec.config.get("env") or {})
    if stopped is not None:
        evidence = {**stopped.evidence, "log": last_lines(output_dir)}
        return TrialResult(stopped.outcome, stopped.reason, evidence=evidence)
    if result_file.exists():
        return TrialResult.from_json(json.loads(result_file.read_text()))
    return TrialResult(
        Outcome.CRASHED,
        f"the launcher ended without a result; see {output_dir / AGENT_LOG_FILE}",
        evidence={"log": last_lines(output_dir)},
    )


def _write_result(result: TrialResult, output_dir: Path, started: float) -> TrialResult:
    result = replace(result, duration_s=time.monotonic() - started)
    write_json_atomically(output_dir / RESULT_FILE, result.to_json())
    return result
