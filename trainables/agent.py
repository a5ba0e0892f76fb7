"""The process that starts a trial's ranks on one node with torch's own launcher.

`trainables.launch` runs it as a child so that the launcher's signal handlers, imports and
rendezvous stay out of the tuner. It takes one argument, a JSON object (see `AgentTask`), and exits
0 when all ranks did; otherwise it leaves `FAILURES_FILE` in the output directory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainables.failures import RankFailure, describe_exception, signal_text
from trainables.processes import AGENT_PID_VARIABLE, die_with_standard_input, leave
from tuner.measurement import write_json_atomically

FAILURES_FILE = "failures.json"
_MONITOR_INTERVAL_S = 0.05
_SHUTDOWN_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What to start: `arguments` follow `python -m module`; `port` 0 lets the store choose."""

    module: str
    arguments: list[str]
    output_dir: str
    ranks_per_node: int
    node_rank: int
    nnodes: int
    master_addr: str
    port: int

    def to_argument(self) -> str:
        return json.dumps(asdict(self))


def run_ranks(task: AgentTask) -> list[RankFailure]:
    """Start the ranks, wait for all, and return how those that failed did."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    single = task.nnodes == 1
    config = LaunchConfig(
        min_nodes=task.nnodes,
        max_nodes=task.nnodes,
        nproc_per_node=task.ranks_per_node,
        run_id="trial",
        rdzv_backend="c10d" if single else "static",
        rdzv_endpoint=f"{task.master_addr}:{task.port}",
        rdzv_configs={} if single else {"rank": task.node_rank},
        local_addr=task.master_addr if single else None,
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(task.output_dir) / "logs"), redirects=Std.ALL),
    )
    try:
        elastic_launch(config, sys.executable)("-m", task.module, *task.arguments)
    except ChildFailedError as error:
        return [_rank_failure(rank, failure) for rank, failure in error.failures.items()]
    except SignalException as error:
        return [RankFailure(0, f"launcher: {signal_text(int(error.sigval))}", time.time(), 1)]
    return []


def launched(task: AgentTask, run: Callable[[], list[RankFailure]]) -> int:
    """Run a node's ranks to their end, and leave failures where `trainables.launch` looks for them.

    The launcher's own failures, before or beside the ranks (rendezvous, ports, file system, a stop
    signal), count as one. Gives the exit code.
    """
    try:
        failures = run()
    except Exception as error:
        failures = [RankFailure(0, f"launcher: {describe_exception(error)}", time.time(), 1)]
    if not failures:
        return 0
    write_json_atomically(
        Path(task.output_dir) / FAILURES_FILE, [failure.to_json() for failure in failures]
    )
    return 1


def _rank_failure(rank: int, failure: Any) -> RankFailure:  # ProcessFailure
    message, time_s = failure.message, float(failure.timestamp)
    if isinstance(message, dict):
        extra = message.get("extraInfo", {})
        time_s = float(extra.get("time_s", time_s))
        message = str(message.get("message", ""))
    return RankFailure(rank, " ".join(str(message).split()), time_s, int(failure.exitcode))


def main() -> int:
    die_with_standard_input()
    task = AgentTask(**json.loads(sys.argv[1]))
    os.environ[AGENT_PID_VARIABLE] = str(os.getpid())
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_SHUTDOWN_TIMEOUT_S)
    return launched(task, lambda: run_ranks(task))


if __name__ == "__main__":
    leave(main())
