"""The Ray session of a study: started or joined, with the signals that end it in order."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

from tuner.cluster.prepared import PreparedJob
from tuner.errors import EnvironmentLacksError

_STARTS = 3


def devices_per_node(prepared: PreparedJob, address: str | None) -> int:
    """Devices an agent holds: a node's GPUs, or CPU ranks of all trials that run side by side."""
    cluster = prepared.job.cluster
    if cluster.device == "cpu" and address is None:
        return cluster.gpus_per_node * (prepared.job.trainable.max_concurrent or 1)
    return cluster.gpus_per_node


@contextlib.contextmanager
def ray_session(prepared: PreparedJob, address: str | None) -> Iterator[None]:
    """A Ray session for the study; a local one ends with it, processes included.

    Raises EnvironmentLacksError where Ray cannot be started, or there is none at `address`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    # Trials reach Tune once they have nodes. Each new actor's imports keep a core busy for seconds:
    # more at once would all start late, and hold their nodes meanwhile.
    os.environ.setdefault("TUNE_MAX_PENDING_TRIALS_PG", str(max(4, 2 * (os.cpu_count() or 1))))
    # The study's storage is what it resumes from; Tune's own state is not needed.
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "3600")
    # Ray lowers its workers' priority by 15, which would slow the measured ranks.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    import ray

    for name in ("ray", "ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    options: dict[str, Any] = {
        "address": address or "local",
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    if address is None:
        devices = devices_per_node(prepared, address)
        options |= {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, devices)}
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    _start(options, address)
    for number, handler in handlers.items():
        signal.signal(number, handler)  # Ray has put its own in place
    try:
        yield
    finally:
        ray.shutdown()


def _start(options: dict[str, Any], address: str | None) -> None:
    """`ray.init`; a local session is tried again where a busy machine made its start time out."""
    import psutil
    import ray

    from trainables.processes import stop_family

    before = {child.pid for child in psutil.Process().children()}
    for attempt in range(_STARTS, 0, -1):
        try:
            ray.init(**options)
            return
        except BaseException as error:
            # Ray raises plain Exceptions here, and leaves what it has started behind.
            for child in psutil.Process().children():
                if child.pid not in before:
                    stop_family(child.pid)
            if not isinstance(error, Exception):
                raise
            known = isinstance(error, (ConnectionError, ValueError))
            if address is None and attempt > 1 and not known:
                continue
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise EnvironmentLacksError(
                f"the Ray cluster at {address or 'this machine'} cannot be used: {first_line}"
            ) from None


@contextlib.contextmanager
def signals_stop_tune() -> Iterator[list[str]]:
    """SIGINT and SIGTERM end the Tune loop in order; the list then names the signal.

    Ray Tune always stops on SIGUSR1; its own SIGINT handler is off, since a second Ctrl-C would
    then end the process before the study is closed. Before the loop runs, the first of the signals
    raises KeyboardInterrupt.
    """
    stopped: list[str] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(signal.Signals(number).name)
        if len(stopped) > 1:
            return
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN:
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGUSR1)

    # Tune installs its handler when the loop begins; until then SIGUSR1 would end the process.
    kept = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    kept[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield stopped
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
