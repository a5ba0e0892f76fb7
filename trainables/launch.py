"""Run one trial in processes of its own and turn every ending into one result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainables.agent import FAILURES_FILE, AgentTask
from trainables.failures import RankFailure, outcome_of
from trainables.processes import stop_family
from tuner.measurement import Outcome, TrialResult, TrialSpec, write_json_atomically

SPEC_FILE = "spec.json"
RESULT_FILE = "result.json"
AGENT_LOG_FILE = "agent.log"

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
) -> TrialResult:
    """Run `spec` with one process per rank and return how it ended.

    `module` is run once per rank as `python -m module --spec FILE --output DIR`. With several
    nodes, call this on each with the same spec, address and port; each starts
    `world_size / nnodes` ranks. `output_dir` receives the spec, logs, error files and
    `result.json`.

    A failure of the trial is an outcome, not an exception: out of memory, crash, timeout
    (`spec.timeout_s`, counted from here), divergence, and, when `cancel` is set, interruption.
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
        ranks_per_node=spec.world_size // nnodes,
        node_rank=node_rank,
        nnodes=nnodes,
        master_addr=master_addr,
        port=master_port or 0,
    )
    deadline = started + spec.timeout_s
    try:
        stopped = _run_agent(task, _rank_environment(spec, nnodes), deadline, cancel)
    except BaseException:
        _write_result(TrialResult(Outcome.INTERRUPTED, "stopped from outside"), output_dir, started)
        raise
    result = _ending(stopped, spec, output_dir)
    return _write_result(result, output_dir, started)


def _run_agent(
    task: AgentTask, environment: Mapping[str, str], deadline: float, cancel: threading.Event | None
) -> Outcome | None:
    """Run the agent to its end. Returns why it was stopped, or None if it ended by itself."""
    with (Path(task.output_dir) / AGENT_LOG_FILE).open("wb") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "trainables.agent", task.to_argument()],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            while True:
                try:
                    agent.wait(timeout=_POLL_S)
                    return None
                except subprocess.TimeoutExpired:
                    pass
                if cancel is not None and cancel.is_set():
                    return Outcome.INTERRUPTED
                if time.monotonic() > deadline:
                    return Outcome.TIMEOUT
        finally:
            stop_family(agent.pid)
            agent.wait()
            if agent.stdin is not None:
                agent.stdin.close()


def _rank_environment(spec: TrialSpec, nnodes: int) -> dict[str, str]:
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
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if nnodes == 1 and sys.platform == "linux":
            # Gloo otherwise resolves the host's name, which a laptop may not know.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.update({k: str(v) for k, v in (spec.config.get("env") or {}).items()})
    return environment


def _ending(stopped: Outcome | None, spec: TrialSpec, output_dir: Path) -> TrialResult:
    if stopped is Outcome.INTERRUPTED:
        return TrialResult(stopped, "cancelled")
    if stopped is Outcome.TIMEOUT:
        return TrialResult(stopped, f"not finished after timeout_s={spec.timeout_s:g}")
    failures = output_dir / FAILURES_FILE
    if failures.exists():
        entries = json.loads(failures.read_text())
        outcome, reason = outcome_of([RankFailure.from_json(entry) for entry in entries])
        return TrialResult(outcome, reason)
    result = output_dir / RESULT_FILE
    if result.exists():
        return TrialResult.from_json(json.loads(result.read_text()))
    return TrialResult(
        Outcome.CRASHED, f"the launcher ended without a result; see {output_dir / AGENT_LOG_FILE}"
    )


def _write_result(result: TrialResult, output_dir: Path, started: float) -> TrialResult:
    result = replace(result, duration_s=time.monotonic() - started)
    write_json_atomically(output_dir / RESULT_FILE, result.to_json())
    return result
