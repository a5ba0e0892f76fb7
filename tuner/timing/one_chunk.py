"""1F1B with one chunk per stage: slots of one pass, in which stages alternate.

In slot `h` the stages of its parity may run a forward pass, the others a backward pass:
`F_s(m)` falls into slot `2m + s`, `B_s(k)` into `2(stages - 1 + k) - s + 1`. All transfers block
(`overlap_p2p_comm` is refused without chunks): after a slot, stage `s` that ran forward exchanges
with `s + 1` that ran backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tuner.timing.recurrence import Durations, Recurrence, runs
from tuner.timing.schedule import Pipeline

if TYPE_CHECKING:
    from tuner.timing.recurrence import Mask


@dataclass(frozen=True, slots=True)
class _Slot:
    forward: slice
    backward: slice
    exchanges: tuple[slice, ...]
    """First stages of the pairs that exchange after the slot."""


class OneChunk(Recurrence):
    """1F1B, and gradient accumulation on a single stage."""

    def __init__(self, pipeline: Pipeline, durations: Durations) -> None:
        super().__init__(pipeline, durations)
        stages, microbatches = pipeline.stages, pipeline.microbatches
        self.slots = 2 * (stages - 1 + microbatches)
        self.period = 4
        self.steady = (2 * stages, 2 * microbatches - 2)
        self._plan = _plan(stages, microbatches)

    def step(self, slot: int) -> None:
        plan, durations, free = self._plan[slot], self.durations, self.free
        if self.durations.release is not None and slot < len(free):
            np.maximum(free[slot], self.durations.release[slot], out=free[slot])
        if self.log is not None:
            self.log.forward_start[slot] = self.log.backward_start[slot] = free[:, 0]
        free[plan.forward] += durations.forward[plan.forward]
        if durations.hidden is not None and slot and slot % 2 == 0:
            free -= durations.hidden  # one stage only: it ran with the backward pass before it
        free[plan.backward] += durations.backward[plan.backward]
        if self.log is not None:
            self.log.forward_end[slot] = self.log.backward_end[slot] = free[:, 0]
        self._mark(slot)
        for low in plan.exchanges:
            high = slice(low.start + 1, low.stop + 1, 2)
            met = np.maximum(free[low], free[high])
            met += durations.p2p[low]
            free[low] = met
            free[high] = met

    def slots_of(self) -> tuple[np.ndarray, np.ndarray]:
        stage = np.arange(self.pipeline.stages)[:, None]
        step = 2 * np.arange(self.pipeline.passes)
        return stage + step, 2 * (self.pipeline.stages - 1) + 1 - stage + step

    def clocks(self) -> list[np.ndarray]:
        return [self.free]

    def part(self, chosen: Mask) -> Recurrence:
        other = OneChunk(self.pipeline, self.durations.select(chosen))
        self._copy_into(other, chosen)
        return other

    def _mark(self, slot: int) -> None:
        """The last backward pass of a stage; the first stage reduces gradients as it runs."""
        stage = 2 * (self.pipeline.stages + self.pipeline.microbatches - 2) + 1 - slot
        if 0 <= stage < self.pipeline.stages:
            self.last_backward[0, stage] = self.free[stage]


@lru_cache(maxsize=256)
def _plan(stages: int, microbatches: int) -> tuple[_Slot, ...]:
    plan = []
    for slot in range(2 * (stages - 1 + microbatches)):
        first = 2 * (stages - 1) + 1 - slot
        forward = _within(slot - 2 * (microbatches - 1), slot, stages)
        backward = _within(first, first + 2 * (microbatches - 1), stages)
        pairs = {s for s in range(forward.start, forward.stop, 2) if s < stages - 1}
        pairs |= {s - 1 for s in range(backward.start, backward.stop, 2) if s > 0}
        plan.append(_Slot(forward, backward, runs(tuple(sorted(pairs)), 2)))
    return tuple(plan)


def _within(low: int, high: int, stages: int) -> slice:
    """The stages from low to high of low's parity."""
    start = low if low >= 0 else low % 2
    stop = min(high, stages - 1) + 1
    return slice(start, max(stop, start), 2)
