"""A process with a trainable's imports done, from which the launchers of trials are forked.

`python -m trainables.template FD MODULE DEVICE` imports by `MODULE.preload(DEVICE)`, says that it
is ready on the socket FD, and then forks a launcher for every request that arrives there. It ends
when the other side closes the socket. CUDA is not initialised here: a forked process could not use
it (see `trainables.warm` for the requests).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

from trainables.agent import AgentTask, launched
from trainables.forked import run_forked
from trainables.processes import AGENT_PID_VARIABLE, leave

READY = b"ready"
REQUEST_BYTES = 1 << 18


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    importlib.import_module(sys.argv[2]).preload(sys.argv[3])
    problem = _why_not_forkable()
    if problem is not None:
        control.send(problem.encode())
        return 1
    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise touch, and so copy, every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended launchers are reaped by the kernel
    control.send(READY)
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES, 1)
        if not request:
            return 0
        if os.fork() == 0:
            control.close()
            _be_launcher(socket.socket(fileno=descriptors[0]), json.loads(request))
        os.close(descriptors[0])


def _why_not_forkable() -> str | None:
    """What makes forks of this process unsafe; None where nothing does."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"the imports started {threads - 1} thread(s)"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the imports initialised CUDA"
    return None


def _be_launcher(owner: socket.socket, request: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.environ[AGENT_PID_VARIABLE] = str(os.getpid())
        sys.path[:0] = [
            entry
            for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if entry and entry not in sys.path
        ]
        task = AgentTask(**request["task"])
        owner.send(b"%d" % os.getpid())
        code = _launch(task, owner)
        owner.send(b"ended")
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def _launch(task: AgentTask, owner: socket.socket) -> int:
    watcher = threading.Thread(target=_die_with, args=(owner,), daemon=True)
    return launched(task, lambda: run_forked(task, on_started=watcher.start))


def _die_with(owner: socket.socket) -> None:
    """End this launcher and its ranks when the starter closes its end, or dies."""
    owner.recv(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    leave(main())
