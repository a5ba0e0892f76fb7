"""The test side of a worker: starts it, asks it, stops it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from constraint_oracle import wheels

SOURCES = Path(__file__).resolve().parents[1]
FRONTENDS = ("mcore", "bridge")
Verdict = dict[str, Any]


class OracleDiedError(RuntimeError):
    """The worker ended or was too slow; the message ends with its last words."""


class Oracle:
    """The real packages of one version behind one front end. Use as a context manager.

    Args:
        mcore: a version of :data:`constraint_oracle.wheels.MCORE_VERSIONS`.
        frontend: "mcore", or "bridge" for the paired Megatron Bridge release.

    Raises:
        WheelUnavailableError: the wheels are neither cached nor can they be fetched.
    """

    def __init__(self, mcore: str, frontend: str = "mcore") -> None:
        self.mcore = mcore
        self.frontend = frontend
        path = [wheels.unpacked("megatron-core", mcore)]
        if frontend == "bridge":
            path.append(wheels.unpacked("megatron-bridge", wheels.BRIDGE_OF_MCORE[mcore]))
        self._path = [str(one) for one in (*path, SOURCES)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        self._worker: subprocess.Popen[str] | None = None

    def __enter__(self) -> Oracle:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(self._path),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        command = [sys.executable, "-m", "constraint_oracle.asker", "--frontend", self.frontend]
        self._worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *_: object) -> None:
        worker = self._worker
        if worker is not None:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.kill()
            worker.wait()
            with contextlib.suppress(BrokenPipeError):  # what it did not read
                worker.stdin.close()
            worker.stdout.close()
        self._errors.close()

    def ask(self, configs: Sequence[Mapping[str, Any]], timeout_s: float = 600.0) -> list[Verdict]:
        """The verdicts of the candidates, in order.

        Raises:
            OracleDiedError: the worker ended early or did not answer within ``timeout_s``.
        """
        worker = self._worker
        assert worker is not None, "use the oracle as a context manager"
        assert worker.stdout is not None
        watchdog = threading.Timer(timeout_s, worker.kill)
        writer = threading.Thread(target=self._write, args=(configs,), daemon=True)
        watchdog.start()
        writer.start()
        try:
            answers = []
            for _ in configs:
                line = worker.stdout.readline()
                if not line:
                    raise OracleDiedError(self._last_words())
                answers.append(json.loads(line))
            return answers
        finally:
            watchdog.cancel()

    def _write(self, configs: Sequence[Mapping[str, Any]]) -> None:
        assert self._worker is not None
        assert self._worker.stdin is not None
        try:
            for config in configs:
                self._worker.stdin.write(json.dumps(config) + "\n")
            self._worker.stdin.flush()
        except BrokenPipeError:  # the reader reports the dead worker
            return

    def _last_words(self) -> str:
        self._errors.seek(0)
        return f"{self.mcore} {self.frontend}: {self._errors.read()[-2000:]}"
