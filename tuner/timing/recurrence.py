"""How passes and transfers of a pipeline wait for each other, for arrays of candidates at once.

Time is cut into slots: in a slot each stage runs at most one forward and then one backward pass,
and hands the results to its neighbours for their next slot. Megatron-Core's warm-up counts make
this alignment exact: forward pass `i` of stage `s` falls into slot `i + s`, backward pass `k` into
slot `lead - s + k`, and from the last stage back to the first it is again one slot while groups
hold as many micro-batches as there are stages. Within a slot stages are independent, so a step is
a short list of array operations over `[stage, candidate]`; times inside are floats, no event is
rounded to a slot.

Transfers follow `P2PCommunicator`:

- Blocking (no `overlap_p2p_comm`, and warm-up and cool-down without
  `overlap_p2p_comm_warmup_flush`): an exchange starts when both sides have reached it, takes
  `p2p_s` both ways at once, and both sides wait for its end.
- Overlapped: a transfer starts when the sender has computed and the receiver has posted its
  receive, which happens one pass ahead; only the pass that needs the data waits. In an overlapped
  warm-up or flush a stage also waits for its send before the last one.

Transfers between two stages are taken not to queue behind each other. With `p2p_s` no longer than a
pass they never do, and results equal an event by event simulation of Megatron-Core's own calls;
with transfers of up to six passes steps end within 5 % of it (tests/unit/timing/test_schedule.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tuner.timing.schedule import Pipeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]
    Mask = NDArray[np.bool_]

NEVER = -np.inf
_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """When stages finish, seconds from the start of the step.

    `end_s` `[candidate, stage]`: the last backward pass is done and handed on.
    `last_backward_end_s` `[candidate, stage, chunk]`: the backward pass of the last micro-batch of
    a chunk is done. `gradient_sync_s`, same shape: when Megatron-Core starts to reduce the
    gradients of a chunk with `align_grad_reduce` (all stages in the same slot).
    """

    end_s: Seconds
    last_backward_end_s: Seconds
    gradient_sync_s: Seconds

    @property
    def pipeline_s(self) -> Seconds:
        """When all stages have finished, `[candidate]`."""
        return self.end_s.max(axis=1)


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of passes and transfers, candidates along the last axis.

    `forward`, `backward`, `hidden` `[(chunk, stage), candidate]`; `p2p` `[stage, candidate]`;
    `release` `[(chunk, stage), candidate]` or None.
    """

    forward: Seconds
    backward: Seconds
    p2p: Seconds
    release: Seconds | None
    hidden: Seconds | None

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        forward_s: Seconds,
        backward_s: Seconds,
        p2p_s: Seconds,
        release_s: Seconds | None = None,
        hidden_s: Seconds | None = None,
    ) -> Durations:
        """From `[candidate, stage, chunk]`, `p2p_s` `[candidate]` or `[candidate, stage]`."""
        count, stages = len(forward_s), pipeline.stages

        def rows(values: Seconds) -> Seconds:
            shape = (count, stages, pipeline.chunks)
            by_chunk = np.broadcast_to(values, shape).transpose(2, 1, 0)
            return np.ascontiguousarray(by_chunk).reshape(-1, count)

        per_stage = p2p_s[:, None] if p2p_s.ndim == 1 else p2p_s
        return cls(
            forward=rows(forward_s),
            backward=rows(backward_s),
            p2p=np.ascontiguousarray(np.broadcast_to(per_stage, (count, stages)).T),
            release=None if release_s is None else rows(release_s),
            hidden=rows(hidden_s) if pipeline.combined and hidden_s is not None else None,
        )

    def select(self, chosen: Mask) -> Durations:
        return Durations(
            *(
                None if x is None else np.ascontiguousarray(x[:, chosen])  # type: ignore[arg-type]
                for x in (self.forward, self.backward, self.p2p, self.release, self.hidden)
            )
        )


class PassLog:
    """What one candidate's stages are at before and after the passes of each slot."""

    def __init__(self, recurrence: Recurrence) -> None:
        shape = (recurrence.slots, recurrence.pipeline.stages)
        self._slots = recurrence.slots_of()
        self.forward_start, self.forward_end = np.zeros(shape), np.zeros(shape)
        self.backward_start, self.backward_end = np.zeros(shape), np.zeros(shape)

    def passes(self) -> tuple[Seconds, Seconds]:
        """Start and end of every pass: forward then backward, `[stage, pass]` each, one axis."""
        stage = np.arange(self.forward_start.shape[1])[:, None]
        forward, backward = self._slots
        return (
            np.concatenate(
                [self.forward_start[forward, stage], self.backward_start[backward, stage]]
            ).ravel(),
            np.concatenate(
                [self.forward_end[forward, stage], self.backward_end[backward, stage]]
            ).ravel(),
        )


class Recurrence(ABC):
    """The state of all stages between two slots, and the step from one slot to the next."""

    slots: int
    period: int
    steady: tuple[int, int]
    """First slot, and the slot past the last, in which the schedule repeats every `period`."""

    log: PassLog | None = None

    def __init__(self, pipeline: Pipeline, durations: Durations) -> None:
        self.pipeline, self.durations = pipeline, durations
        count = durations.forward.shape[1]
        self.free = np.zeros((pipeline.stages, count))
        shape = (pipeline.chunks, pipeline.stages, count)
        self.last_backward = np.zeros(shape)
        self.sync = np.full(shape, NEVER)

    @abstractmethod
    def step(self, slot: int) -> None:
        """Run one slot."""

    @abstractmethod
    def slots_of(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The slot of each forward and of each backward pass, `[stage, pass]`."""

    @abstractmethod
    def clocks(self) -> list[Seconds]:
        """The arrays that hold the state; adding a constant to all moves it in time."""

    def leap(self, slots: int) -> None:  # noqa: B027 - most schedules keep nothing by slot
        """The next slot is this many later than it was."""

    @abstractmethod
    def part(self, chosen: Mask) -> Recurrence:
        """The same state for some of the candidates."""

    def run_all(self) -> PassLog:
        """Run every slot, noting all passes."""
        self.log = PassLog(self)
        for slot in range(self.slots):
            self.step(slot)
        return self.log

    def times(self) -> PipelineTimes:
        """What there is to know at the end."""
        end = self.free
        sync = np.where(self.sync == NEVER, end, self.sync)
        return PipelineTimes(
            np.ascontiguousarray(end.T),
            np.ascontiguousarray(self.last_backward.transpose(2, 1, 0)),
            np.ascontiguousarray(sync.transpose(2, 1, 0)),
        )

    def _copy_into(self, other: Recurrence, chosen: Mask) -> None:
        other.free = np.ascontiguousarray(self.free[:, chosen])
        other.last_backward = np.ascontiguousarray(self.last_backward[:, :, chosen])
        other.sync = np.ascontiguousarray(self.sync[:, :, chosen])


def make_recurrence(pipeline: Pipeline, durations: Durations) -> Recurrence:
    """The recurrence of a pipeline at the start of its step."""
    from tuner.timing.interleaved import Interleaved
    from tuner.timing.one_chunk import OneChunk

    if pipeline.chunks == 1:
        return OneChunk(pipeline, durations)
    return Interleaved(pipeline, durations)


def finish(recurrence: Recurrence) -> PipelineTimes:
    """Run to the end, leaping over periods once the state repeats itself.

    The recurrence is max-plus linear and the same in every period of its steady part: a state that
    one period moves by the same time for all stages will move so again, exactly. Candidates that
    have not settled go on slot by slot.
    """
    return _finish(recurrence, 0)


def _finish(recurrence: Recurrence, slot: int) -> PipelineTimes:
    first, end = recurrence.steady
    before: list[Seconds] | None = None
    while slot < recurrence.slots:
        left = (end - slot) // recurrence.period
        if slot >= first and (slot - first) % recurrence.period == 0 and left >= 1:
            clocks = recurrence.clocks()
            if before is not None:
                moved, settled = _shift(before, clocks)
                if settled.all():
                    for clock in clocks:
                        clock += left * moved
                    recurrence.leap(left * recurrence.period)
                    slot += left * recurrence.period
                    before = None
                    continue
                if settled.mean() >= 0.5:
                    return _finish_apart(recurrence, slot, settled, moved * left, left)
            before = [clock.copy() for clock in clocks]
        recurrence.step(slot)
        slot += 1
    return recurrence.times()


def _finish_apart(
    recurrence: Recurrence, slot: int, settled: Mask, leap: Seconds, left: int
) -> PipelineTimes:
    """Settled candidates leap to the end of the steady part; the others go on."""
    ahead, behind = recurrence.part(settled), recurrence.part(~settled)
    for clock in ahead.clocks():
        clock += leap[settled]
    ahead.leap(left * recurrence.period)
    parts = [_finish(ahead, slot + left * recurrence.period), _finish(behind, slot)]
    order = np.argsort(np.concatenate([np.flatnonzero(settled), np.flatnonzero(~settled)]))
    return PipelineTimes(
        *(
            np.concatenate([getattr(part, name) for part in parts])[order]
            for name in PipelineTimes.__slots__
        )
    )


def _shift(before: list[Seconds], after: list[Seconds]) -> tuple[Seconds, Mask]:
    """How far a period moved each candidate, and whether it moved all its clocks alike."""
    moved: Seconds = after[0][0] - before[0][0]
    tolerance = _TOLERANCE * np.abs(after[0][0])
    settled = np.ones(len(moved), dtype=bool)
    for old, new in zip(before, after, strict=True):
        with np.errstate(invalid="ignore"):
            off = np.abs(new - old - moved)
        off[(old == NEVER) & (new == NEVER)] = 0.0
        settled &= (off <= tolerance).all(axis=0)
    return moved, settled


@lru_cache(maxsize=512)
def runs(numbers: tuple[int, ...], stride: int) -> tuple[slice, ...]:
    """Ascending numbers as few slices of one stride."""
    found: list[slice] = []
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + stride:
            found.append(slice(numbers[start], numbers[index - 1] + 1, stride))
            start = index
    return tuple(found)
