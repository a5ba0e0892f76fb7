"""What is measured inside Megatron Bridge's training loop: a callback of its own kind.

The loop fires `on_train_start`, `on_train_step_start` and `on_train_step_end`
(megatron/bridge/training/train.py); whatever has these methods may be registered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from tuner.search.stopping import cannot_beat


class Meter(Protocol):
    """The device under a rank; `notes` say what its figures are of."""

    notes: dict[str, str]

    def synchronize(self) -> None: ...

    def start(self) -> None:
        """Peaks count from here: model and optimizer exist."""

    def peaks_bytes(self) -> tuple[int, int | None, int | None]:
        """Peak allocated, reserved and whole-device bytes."""


class MeasuredEnough(BaseException):
    """Ends the training loop from within; no `except Exception` on the way holds it up."""


class StepRecorder:
    """Times every step between two synchronisations of the device and keeps its loss.

    After `warmup_steps + measure_steps` steps, or as soon as all ranks agree (`agree`, a logical
    or over ranks) that the run cannot beat `beat_step_time_s`, `MeasuredEnough` is raised on every
    rank; `step_times_s` then holds the measured steps.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        warmup_steps: int,
        measure_steps: int,
        beat_step_time_s: float | None = None,
        agree: Callable[[bool], bool] = bool,
        progress: Callable[[int], None] = lambda steps: None,
    ) -> None:
        self.losses: list[float] = []
        self.step_times_s: list[float] = []
        self._meter = meter
        self._warmup_left = warmup_steps
        self._measure_steps = measure_steps
        self._beat_step_time_s = beat_step_time_s
        self._agree = agree
        self._progress = progress
        self._steps = 0
        self._started = 0.0

    def on_train_start(self, context: Any) -> None:
        self._meter.start()

    def on_train_step_start(self, context: Any) -> None:
        self._meter.synchronize()
        self._started = time.perf_counter()

    def on_train_step_end(self, context: Any) -> None:
        self._meter.synchronize()
        seconds = time.perf_counter() - self._started
        self._steps += 1
        self._progress(self._steps)
        loss = loss_of(context.loss_dict)
        if loss is not None:
            self.losses.append(loss)
        if self._warmup_left:
            self._warmup_left -= 1
            return
        self.step_times_s.append(seconds)
        if len(self.step_times_s) >= self._measure_steps or self._cannot_win():
            raise MeasuredEnough

    def _cannot_win(self) -> bool:
        if self._beat_step_time_s is None:
            return False
        return self._agree(cannot_beat(self.step_times_s, self._beat_step_time_s))


def loss_of(losses: Any) -> float | None:
    """The language model loss of a step; None on ranks without the last pipeline stage."""
    for name, value in (losses or {}).items():
        if "loss" in name:
            return float(value.item() if hasattr(value, "item") else value)
    return None
