"""Worker processes that make dry runs, kept for the life of this process."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tuner.errors import InputError
from tuner.memory.errors import RefusedError, UnsupportedError
from tuner.memory.request import DryRunRequest
from tuner.memory.trace import Trace

_LIMIT_S = 1800.0  # a dry run that takes longer will not end
_STEERING = ("NVTE_", "CUBLAS_", "NCCL_", "PYTORCH_", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Variables that steer a training run: a dry run takes them from its request alone."""


class DryRunError(RuntimeError):
    """A dry run failed for a reason that is no fault of the request."""


class _Worker:
    """One worker process; serves one request at a time."""

    def __init__(self, request: DryRunRequest, mcore: Path | None) -> None:
        environment = {n: v for n, v in os.environ.items() if not n.startswith(_STEERING)}
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        if mcore is not None:
            paths = [str(mcore), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, "-m", "tuner.memory.worker"]
        command += [request.layers, request.te_version, request.architecture]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the worker
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )

    def run(self, request: DryRunRequest) -> tuple[Trace, dict[str, str]]:
        with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
            path = Path(folder) / "trace.npz"
            answer = self._ask({"request": request.to_json(), "trace": str(path)})
            if "error" in answer:
                raise _error(answer)
            return Trace.load(path), answer["assumptions"]

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        limit = threading.Timer(_LIMIT_S, self._process.kill)
        limit.daemon = True
        limit.start()
        try:
            stdin.write(json.dumps(job) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            limit.cancel()
        if not line:
            self._log.seek(0)
            raise DryRunError(f"the dry-run worker ended: {self._log.read()[-2000:]}")
        document: dict[str, Any] = json.loads(line)
        return document

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait()


_idle: dict[Any, list[_Worker]] = {}
_idle_lock = threading.Lock()


def record(request: DryRunRequest, mcore: Path | None = None) -> tuple[Trace, dict[str, str]]:
    """The trace of a request and what it took for granted, made in a worker process.

    As many workers run as threads call this at once. Raises UnsupportedError, InputError or
    DryRunError.
    """
    if request.te_version.startswith(("0.", "1.")):
        raise UnsupportedError(
            f"layers of Transformer Engine {request.te_version} are not modelled",
            field="te_version",
            fix="name 2.0 or later",
        )
    key = (os.getpid(), request.layers, request.te_version, request.architecture, mcore)
    with _idle_lock:
        idle = _idle.setdefault(key, [])
        worker = idle.pop() if idle else None
    worker = worker or _Worker(request, mcore)
    try:
        result = worker.run(request)
    except InputError:
        _give_back(key, worker)
        raise
    except BaseException:  # its answer may still come: nobody may take it for another's
        worker.stop()
        raise
    _give_back(key, worker)
    return result


def _give_back(key: Any, worker: _Worker) -> None:
    with _idle_lock:
        _idle.setdefault(key, []).append(worker)


def stop_workers() -> None:
    """End all idle workers of this process."""
    with _idle_lock:
        mine = [key for key in _idle if key[0] == os.getpid()]
        workers = [worker for key in mine for worker in _idle.pop(key)]
    for worker in workers:
        worker.stop()


atexit.register(stop_workers)


def _error(answer: dict[str, Any]) -> Exception:
    if answer["error"] == "crash":
        return DryRunError(answer["message"])
    kinds = {"unsupported": UnsupportedError, "refused": RefusedError}
    kind = kinds.get(answer["error"], InputError)
    return kind(answer["message"], field=answer["field"], fix=answer["fix"])
