"""Ends of processes: dying with a parent, and stopping a whole family at once."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

AGENT_PID_VARIABLE = "TRIAL_AGENT_PID"
"""Environment variable that tells a rank which process must be alive."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STOP_WAIT_S = 5.0


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens.

    Called first thing in a rank: torch's launcher starts ranks in sessions of their own, which a
    signal to the launcher's group does not reach. Without effect outside Linux.
    """
    if sys.platform != "linux":
        return
    # A hung rank is asked for its stacks before it is killed.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    tell_when_parent_ends(signal.SIGKILL)


def tell_when_parent_ends(number: int) -> None:
    """Have the kernel send this process signal `number` when its parent ends (Linux only)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    expected = os.environ.get(AGENT_PID_VARIABLE)
    if expected is not None and os.getppid() != int(expected):
        # The parent ended before the request above.
        os.kill(os.getpid(), number)


def leave(exit_code: int) -> NoReturn:
    """End this process now, without taking down the interpreter.

    With torch loaded, that takes as long as importing it. Output is flushed; nothing else that a
    rank or the agent has open needs an orderly end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def die_with_standard_input() -> None:
    """Kill this process's group when standard input closes.

    The starter holds the other end of a pipe and writes nothing: it closes when the starter
    closes it or ends, even by SIGKILL.
    """

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def stop_family(pid: int) -> None:
    """Kill a process and all its descendants, and wait until they are gone.

    Descendants are found by parentage, so those in other sessions are included.
    """
    import psutil

    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family[1:], timeout=_STOP_WAIT_S)


def stop_marked(agent_pid: int, *, spare: int | None = None) -> None:
    """Kill every process that was started for the trial of an agent, wherever it hangs now.

    A command's own launcher may be killed and leave its ranks to the init process, where
    parentage says nothing; the environment they inherited still does (`AGENT_PID_VARIABLE`).
    """
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == spare or process.environ().get(AGENT_PID_VARIABLE) != str(agent_pid):
                continue
            process.kill()
        except psutil.Error:
            continue
        found.append(process)
    psutil.wait_procs(found, timeout=_STOP_WAIT_S)


def free_port(host: str = "") -> int:
    """A TCP port that was free a moment ago, on every address or on that of `host`."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
