"""Warm starts: trials launched as forks of a process that has done the imports.

Importing torch and Megatron-Core costs a trial seconds in its launcher and in every rank. A node
keeps one template process per trainable and forks from it; whatever speaks against that (another
operating system, variables that are read while importing, a template that died) is answered by a
plain launch.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from trainables.agent import AgentTask
from trainables.template import READY, REQUEST_BYTES

_START_TIMEOUT_S = 300.0
_PID_TIMEOUT_S = 30.0
_LATE_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_",
    "PYTHONPATH",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_",
)
"""Variables, or beginnings of them, that are read when CUDA, NCCL or Gloo start, so after a fork.

The allocator's `backend` is chosen when torch's libraries are loaded
(`BackendStaticInitializer`, c10/cuda/CUDACachingAllocator.cpp)."""


class WarmLauncher:
    """One trial's launcher, forked from a template. `pid` leads its session and process group."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self.pid = pid
        self._ended: bool | None = None

    def ended(self, wait_s: float) -> bool | None:
        """Wait at most this long: None while it runs, else whether it ended in order."""
        if self._ended is None and select.select([self._connection], [], [], wait_s)[0]:
            try:
                self._ended = bool(self._connection.recv(16))
            except ConnectionResetError:
                self._ended = False
        return self._ended

    def close(self) -> None:
        """Let the launcher and its ranks end."""
        self._connection.close()


class Template:
    """Starts a template process when first needed, and again when it has died."""

    def __init__(self, preload: str, device: str, environment: Mapping[str, str]) -> None:
        self._arguments = (preload, device)
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._given_up = sys.platform != "linux"

    def start(self) -> None:
        """Begin the imports; does not wait for them."""
        with self._lock:
            if not self._given_up and self._process is None:
                self._spawn()

    def launch(
        self, task: AgentTask, environment: Mapping[str, str], log: Path
    ) -> WarmLauncher | None:
        """Fork a launcher for `task`; None where a plain launch is called for."""
        if self._given_up or not self.suits(environment):
            return None
        request = {"task": asdict(task), "environment": dict(environment), "log": str(log)}
        message = json.dumps(request).encode()
        if len(message) > REQUEST_BYTES:
            return None
        with self._lock:
            control = self._ready()
            return None if control is None else _request(control, message)

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether these variables differ from the template's only where that still counts."""
        names = {
            name
            for name in {*environment, *self._environment}
            if environment.get(name) != self._environment.get(name)
        }
        return all(
            name.startswith(_LATE_VARIABLES) and "backend:" not in environment.get(name, "")
            for name in names
        )

    def close(self) -> None:
        """End the template; launchers forked from it go on."""
        with self._lock:
            self._given_up = True
            self._stop()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "trainables.template", str(theirs.fileno())]
        self._process = subprocess.Popen(
            [*command, *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        self._control, self._is_ready = ours, False

    def _ready(self) -> socket.socket | None:
        """The control socket of a template that takes requests; one restart is tried."""
        for _ in range(2):
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._spawn()
            if self._answers():
                return self._control
        self._given_up = True
        self._stop()
        return None

    def _answers(self) -> bool:
        assert self._control is not None
        if not self._is_ready and select.select([self._control], [], [], _START_TIMEOUT_S)[0]:
            self._is_ready = self._control.recv(256) == READY
        return self._is_ready

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


def _request(control: socket.socket, message: bytes) -> WarmLauncher | None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        socket.send_fds(control, [message], [theirs.fileno()])
    except OSError:
        ours.close()
        return None
    finally:
        theirs.close()
    pid = ours.recv(16) if select.select([ours], [], [], _PID_TIMEOUT_S)[0] else b""
    if not pid:
        ours.close()
        return None
    return WarmLauncher(ours, int(pid))


def template_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a template for trials of this one: no variable that counts later."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_LATE_VARIABLES) or name == "PYTHONPATH"
    }
