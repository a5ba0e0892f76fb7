"""Ranks forked from a process that has everything imported: a launcher without start-up cost.

Ranks see the environment torch's own launcher gives them (`torch.distributed.elastic.agent.server.
local_elastic_agent`), a store that the first node's launcher holds included, write the same error
files, and end with the launcher.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainables.failures import RankFailure, signal_text
from trainables.processes import die_with_parent, leave

if TYPE_CHECKING:
    from trainables.agent import AgentTask

_GRACE_S = 2.0
"""After the first failure, for the other ranks to fail for a reason of their own."""
_POLL_S = 0.02
_STORE_TIMEOUT_S = 300


class StoppedError(Exception):
    """The launcher was asked to end (SIGTERM)."""


@dataclass(slots=True)
class _Rank:
    local_rank: int
    pid: int
    port_pipe: int
    error_file: Path


def run_forked(task: AgentTask, on_started: Callable[[], None]) -> list[RankFailure]:
    """Fork the node's ranks, wait for all, and return how those that failed did.

    Call it from the main thread of a process without others; `on_started` may start some, once the
    ranks exist. Raises StoppedError when SIGTERM comes; no rank is left then either.
    """
    signal.signal(signal.SIGTERM, _stop)
    ranks = [_fork_rank(task, local_rank) for local_rank in range(task.ranks_per_node)]
    store = None
    try:
        # After the forks: threads must not be copied.
        on_started()
        store, port = _hold_store(task)
        for rank in ranks:
            os.write(rank.port_pipe, b"%d\n" % port)
            os.close(rank.port_pipe)
        return _wait(task, {rank.pid: rank for rank in ranks})
    finally:
        _kill_all([rank.pid for rank in ranks])
        del store


def _stop(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # once is enough, and the ranks must be ended in peace
    raise StoppedError(signal_text(number))


def _hold_store(task: AgentTask) -> tuple[Any, int]:
    """The store ranks meet at, held by the first node, and its port."""
    if task.node_rank:
        return None, task.port
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(
        task.master_addr,
        task.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_STORE_TIMEOUT_S),
    )
    return store, store.port


def _fork_rank(task: AgentTask, local_rank: int) -> _Rank:
    folder = Path(task.output_dir) / "logs" / f"node{task.node_rank}" / str(local_rank)
    folder.mkdir(parents=True, exist_ok=True)
    error_file = folder / "error.json"
    error_file.unlink(missing_ok=True)
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(writing)
            code = _be_rank(task, local_rank, folder, error_file, reading)
        except BaseException:
            # Recorded in the error file by the program itself; the trace belongs in the log.
            sys.excepthook(*sys.exc_info())
        finally:
            leave(code)
    os.close(reading)
    return _Rank(local_rank, pid, writing, error_file)


def _be_rank(
    task: AgentTask, local_rank: int, folder: Path, error_file: Path, port_pipe: int
) -> int:
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name, descriptor in (("stdout.log", 1), ("stderr.log", 2)):
        log = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, descriptor)
        os.close(log)
    port = os.read(port_pipe, 16).strip()
    os.close(port_pipe)
    if not port:
        return 1  # the launcher ended
    os.environ.update(_environment(task, local_rank, int(port), error_file))
    sys.argv = [task.module, *task.arguments]
    try:
        runpy.run_module(task.module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _environment(task: AgentTask, local_rank: int, port: int, error_file: Path) -> dict[str, str]:
    rank = task.node_rank * task.ranks_per_node + local_rank
    world_size = task.nnodes * task.ranks_per_node
    numbers = {
        "LOCAL_RANK": local_rank,
        "RANK": rank,
        "GROUP_RANK": task.node_rank,
        "ROLE_RANK": rank,
        "LOCAL_WORLD_SIZE": task.ranks_per_node,
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": task.nnodes,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {
        **{name: str(value) for name, value in numbers.items()},
        "ROLE_NAME": "default",
        "MASTER_ADDR": task.master_addr,
        "TORCHELASTIC_RUN_ID": "trial",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }


def _wait(task: AgentTask, running: dict[int, _Rank]) -> list[RankFailure]:
    """Until all ranks ended, or some failed and the others had their time to."""
    failures: list[RankFailure] = []
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG if failures else 0)
        if pid == 0:
            time.sleep(_POLL_S)
            continue
        rank = running.pop(pid, None)
        code = os.waitstatus_to_exitcode(status)
        if rank is None or code == 0:
            continue
        failures.append(_failure(task, rank, code))
        deadline = min(deadline, time.monotonic() + _GRACE_S)
    return failures


def _failure(task: AgentTask, rank: _Rank, code: int) -> RankFailure:
    number = task.node_rank * task.ranks_per_node + rank.local_rank
    now = time.time()
    try:
        document = json.loads(rank.error_file.read_text())["message"]
        time_s = float(document["extraInfo"].get("time_s", document["extraInfo"]["timestamp"]))
        message = " ".join(str(document["message"]).split())
    except (OSError, ValueError, KeyError, TypeError):
        time_s, message = now, _ended_by(code)
    return RankFailure(number, message, time_s, code)


def _ended_by(code: int) -> str:
    if code < 0:
        return signal_text(-code)
    return f"the process ended with exit code {code}"


def _kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            continue  # reaped before: the number may belong to another process by now
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
