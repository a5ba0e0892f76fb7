"""Interleaved 1F1B: slots of one forward and one backward pass, in a ring of stages.

`forward_backward_pipelining_with_interleaving` with its three ways of communicating: blocking,
overlapped in the steady part, overlapped throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tuner.timing.recurrence import NEVER, Durations, Recurrence, runs
from tuner.timing.schedule import Pipeline

if TYPE_CHECKING:
    from tuner.timing.recurrence import Mask, PipelineTimes


@dataclass(frozen=True, slots=True)
class _Slot:
    """What happens in one slot; ranges of stages are half open."""

    forward: tuple[int, int]
    backward: tuple[int, int]
    forward_parts: tuple[tuple[slice, slice], ...]
    """Stages that run the same chunk, and their rows in the durations."""
    backward_parts: tuple[tuple[slice, slice], ...]
    hidden_parts: tuple[tuple[slice, slice], ...]
    """The backward passes that are combined with a forward pass."""
    steady: bool
    """All stages run both passes in this slot and the next: no wait for a send ever binds."""
    wraps_forward: int
    """Slot in which the first stage uses what the last stage sends back to it now; 0: nothing."""
    wraps_backward: int
    exchanges: tuple[slice, ...]
    warmup_below: int
    """Stages before this one are still in their warm-up."""
    flush_below: int
    """Stages before this one have run all their forward passes."""
    late: int | None
    """The stage that asks for its first gradient after this slot's exchange, not in it."""
    first: tuple[tuple[int, int], ...]
    """(stage, chunk) whose forward pass is that of micro-batch 0."""
    last: tuple[tuple[int, int], ...]
    """(stage, chunk) whose backward pass is that of the last micro-batch."""
    sync: tuple[int, ...]
    """Chunks whose gradients all stages reduce after this slot."""


class Interleaved(Recurrence):
    """Interleaved 1F1B."""

    def __init__(self, pipeline: Pipeline, durations: Durations) -> None:
        super().__init__(pipeline, durations)
        self._plan, self.slots, self.steady = _plan(pipeline)
        self.period = pipeline.group * pipeline.chunks
        self._forward_in = np.full_like(self.free, NEVER)
        self._backward_in = np.full_like(self.free, NEVER)
        self._around_forward = np.full_like(self.free[0], NEVER)
        self._around_backward = np.full_like(self.free[0], NEVER)
        self._flushes = pipeline.overlap_warmup_flush
        longest = durations.p2p.max(axis=0, initial=0.0)
        shortest = np.minimum(durations.forward.min(axis=0), durations.backward.min(axis=0))
        self._prompt = bool((longest <= shortest).all()) and not pipeline.combined
        """In the steady part no receiver asks for data later than the data could be there."""
        self._wrapped_forward: dict[int, np.ndarray] = {}
        self._wrapped_backward: dict[int, np.ndarray] = {}

    def step(self, slot: int) -> None:
        plan = self._plan[slot]
        (fa, fb), (ba, bb) = plan.forward, plan.backward
        if fa == 0:
            self._forward_in[0] = self._wrapped_forward.pop(slot, NEVER)
        if bb == self.pipeline.stages:
            self._backward_in[-1] = self._wrapped_backward.pop(slot, NEVER)
        ready = self._forward(slot, plan) if fa < fb else self.free
        overlapped = self.pipeline.overlap_p2p
        if overlapped and not self.pipeline.combined:
            self._overlapped_forward(plan, ready)
        ready = self._backward(slot, plan) if ba < bb else self.free
        if not overlapped:
            self._exchange(plan)
            return
        if self.pipeline.combined:
            self._overlapped_forward(plan, self.free)
        self._overlapped_backward(plan, ready)

    def times(self) -> PipelineTimes:
        if self._flushes:
            np.maximum(self.free[1:], self._backward_in[:-1], out=self.free[1:])
        return super().times()

    def slots_of(self) -> tuple[np.ndarray, np.ndarray]:
        stage = np.arange(self.pipeline.stages)[:, None]
        step = np.arange(self.pipeline.passes)
        return stage + step, _lead(self.pipeline) - stage + step

    def clocks(self) -> list[np.ndarray]:
        around = [self._around_forward[None], self._around_backward[None]]
        return [self.free, self._forward_in, self._backward_in, *around, *self._wraps()]

    def part(self, chosen: Mask) -> Recurrence:
        other = Interleaved(self.pipeline, self.durations.select(chosen))
        self._copy_into(other, chosen)
        for name in ("_forward_in", "_backward_in", "_around_forward", "_around_backward"):
            setattr(other, name, np.ascontiguousarray(getattr(self, name)[..., chosen]))
        for name in ("_wrapped_forward", "_wrapped_backward"):
            setattr(other, name, {k: v[chosen] for k, v in getattr(self, name).items()})
        return other

    def leap(self, slots: int) -> None:
        """What is on its way round the ring is used that much later."""
        self._wrapped_forward = {k + slots: v for k, v in self._wrapped_forward.items()}
        self._wrapped_backward = {k + slots: v for k, v in self._wrapped_backward.items()}

    def _wraps(self) -> list[np.ndarray]:
        both = (self._wrapped_forward, self._wrapped_backward)
        return [wrapped[slot][None] for wrapped in both for slot in sorted(wrapped)]

    def _forward(self, slot: int, plan: _Slot) -> np.ndarray:
        """Run the forward passes; returns from when on each stage waits for its next input."""
        fa, fb = plan.forward
        free, stages = self.free, self.pipeline.stages
        np.maximum(free[fa:fb], self._forward_in[fa:fb], out=free[fa:fb])
        if self.pipeline.combined:
            both = slice(max(fa, plan.backward[0]), min(fb, plan.backward[1]))
            np.maximum(free[both], self._backward_in[both], out=free[both])
        if self.durations.release is not None:
            for stage, chunk in plan.first:
                released = self.durations.release[chunk * stages + stage]
                np.maximum(free[stage], released, out=free[stage])
        posted = free.copy() if self._flushes else free
        if self.log is not None:
            self.log.forward_start[slot] = free[:, 0]
        for at, rows in plan.forward_parts:
            free[at] += self.durations.forward[rows]
        if self.log is not None:
            self.log.forward_end[slot] = free[:, 0]
        return posted

    def _backward(self, slot: int, plan: _Slot) -> np.ndarray:
        """Run the backward passes; returns from when on each stage waits for its next gradient."""
        ba, bb = plan.backward
        free, durations = self.free, self.durations
        np.maximum(free[ba:bb], self._backward_in[ba:bb], out=free[ba:bb])
        posted = free.copy() if self._flushes else free
        if self.log is not None:
            self.log.backward_start[slot] = free[:, 0]
        for at, rows in plan.backward_parts:
            free[at] += durations.backward[rows]
        if durations.hidden is not None:
            for at, rows in plan.hidden_parts:
                free[at] -= durations.hidden[rows]
        if self.log is not None:
            self.log.backward_end[slot] = free[:, 0]
        for stage, chunk in plan.last:
            self.last_backward[chunk, stage] = free[stage]
        for chunk in plan.sync:
            self.sync[chunk, ba:bb] = free[ba:bb]
        return posted

    def _exchange(self, plan: _Slot) -> None:
        """All neighbours with something to hand over meet, and go on together."""
        free, p2p = self.free, self.durations.p2p
        met = []
        for low in plan.exchanges:
            pair = np.maximum(free[low], free[low.start + 1 : low.stop + 1])
            pair += p2p[low]
            met.append(pair)
        wraps = plan.wraps_forward or plan.wraps_backward
        around = np.maximum(free[0], free[-1]) + p2p[-1] if wraps else None
        for low, pair in zip(plan.exchanges, met, strict=True):
            high = slice(low.start + 1, low.stop + 1)
            np.maximum(free[low], pair, out=free[low])
            np.maximum(free[high], pair, out=free[high])
        if around is not None:
            np.maximum(free[0], around, out=free[0])
            np.maximum(free[-1], around, out=free[-1])
        if plan.late is not None:
            # With nothing but warm-up before it, a stage asks for its first gradient only now.
            s = plan.late
            free[s] += p2p[s]
            np.maximum(free[s + 1], free[s], out=free[s + 1])

    def _arrivals(
        self,
        sends: np.ndarray,
        receives: np.ndarray,
        p2p: np.ndarray,
        out: np.ndarray | None,
        plan: _Slot,
    ) -> np.ndarray:
        """When transfers end that both sides have asked for at these times."""
        if plan.steady and self._prompt:
            prompt: np.ndarray = np.add(sends, p2p, out=out)
            return prompt
        arrivals: np.ndarray = np.maximum(sends, receives, out=out)
        arrivals += p2p
        return arrivals

    def _overlapped_forward(self, plan: _Slot, posted: np.ndarray) -> None:
        """Send what the forward passes made; `posted` is when overlapped warm-ups wait for it."""
        fa, fb = plan.forward
        if fa == fb:
            return
        free, p2p, stages = self.free, self.durations.p2p, self.pipeline.stages
        waiting = free
        if self._flushes and plan.warmup_below > 1:
            waiting = free.copy()
            waiting[1 : plan.warmup_below] = posted[1 : plan.warmup_below]
        to = min(fb, stages - 1)
        old = self._forward_in[fa + 1 : to + 1]
        sends, receives = free[fa:to], waiting[fa + 1 : to + 1]
        # Where every stage has waited for its last send already, nothing needs the old arrivals.
        settled = plan.steady or (not self._flushes and fb <= plan.warmup_below)
        arrivals = self._arrivals(sends, receives, p2p[fa:to], old if settled else None, plan)
        around = NEVER
        if plan.wraps_forward:
            around = np.maximum(free[-1], waiting[0]) + p2p[-1]
            self._wrapped_forward[plan.wraps_forward] = around
        if fb == stages:
            np.maximum(free[-1], self._around_forward, out=free[-1])
            self._around_forward[:] = around
        if not settled:
            np.maximum(sends, old, out=sends)
            old[:] = arrivals
        blocked = min(fb, plan.warmup_below)
        if self._flushes or fa >= blocked:
            return
        out = slice(fa, min(to, blocked))
        np.maximum(free[out], arrivals[: out.stop - fa], out=free[out])
        received = slice(fa + 1, max(fa + 1, min(to + 1, plan.warmup_below)))
        np.maximum(free[received], arrivals[: received.stop - fa - 1], out=free[received])
        np.maximum(free[0], around, out=free[0])
        if blocked == stages:
            np.maximum(free[-1], around, out=free[-1])

    def _overlapped_backward(self, plan: _Slot, posted: np.ndarray) -> None:
        """Send what the backward passes made; `posted` is when overlapped flushes wait for it."""
        ba, bb = plan.backward
        if ba == bb:
            return
        free, p2p, stages = self.free, self.durations.p2p, self.pipeline.stages
        waiting = free
        flushing = min(plan.flush_below, stages - 1)
        if self._flushes and flushing > 0:
            waiting = free.copy()
            waiting[:flushing] = posted[:flushing]
        to = max(ba, 1)
        old = self._backward_in[to - 1 : bb - 1]
        sends, receives = free[to:bb], waiting[to - 1 : bb - 1]
        settled = plan.steady or (not self._flushes and bb <= plan.flush_below)
        arrivals = self._arrivals(
            sends, receives, p2p[to - 1 : bb - 1], old if settled else None, plan
        )
        around = NEVER
        if plan.wraps_backward:
            around = np.maximum(free[0], waiting[-1]) + p2p[-1]
            self._wrapped_backward[plan.wraps_backward] = around
        if ba == 0:
            np.maximum(free[0], self._around_backward, out=free[0])
            self._around_backward[:] = around
        if not settled:
            np.maximum(sends, old, out=sends)
            old[:] = arrivals
        blocked = min(bb, plan.flush_below)
        if self._flushes or ba >= blocked:
            return
        out = slice(to, max(to, blocked))
        np.maximum(free[out], arrivals[: out.stop - to], out=free[out])
        received = slice(to - 1, min(bb - 1, plan.flush_below))
        np.maximum(free[received], arrivals[: received.stop - received.start], out=free[received])
        np.maximum(free[0], around, out=free[0])
        if plan.flush_below >= stages:
            np.maximum(free[-1], around, out=free[-1])


def _lead(pipeline: Pipeline) -> int:
    """The slot of the first stage's first backward pass."""
    ahead = 2 * (pipeline.stages - 1) + (pipeline.chunks - 1) * pipeline.group
    return ahead + pipeline.combined


@lru_cache(maxsize=64)
def _plan(pipeline: Pipeline) -> tuple[_Slots, int, tuple[int, int]]:
    slots = _lead(pipeline) + pipeline.passes
    full = pipeline.microbatches // pipeline.group * pipeline.group * pipeline.chunks
    plan = _Slots(pipeline, pipeline.table())
    return plan, slots, (_lead(pipeline), min(full, pipeline.passes - 1))


class _Slots:
    """The slots of a schedule, each planned when it is first asked for: the steady ones between
    the first periods and the end never are."""

    def __init__(self, pipeline: Pipeline, table: list[tuple[int, int]]) -> None:
        self._pipeline, self._table = pipeline, table
        self._made: dict[int, _Slot] = {}

    def __getitem__(self, slot: int) -> _Slot:
        if slot not in self._made:
            self._made[slot] = _slot(self._pipeline, self._table, slot)
        return self._made[slot]


def _slot(pipeline: Pipeline, table: list[tuple[int, int]], slot: int) -> _Slot:
    stages, total, lead = pipeline.stages, pipeline.passes, _lead(pipeline)
    last_chunk, last = pipeline.chunks - 1, pipeline.microbatches - 1
    forward = _present(slot - total + 1, slot, stages)
    backward = _present(lead - slot, lead - slot + total - 1, stages)
    forward_of = {s: table[slot - s] for s in range(*forward)}
    backward_of = {s: table[slot - lead + s] for s in range(*backward)}
    backward_chunks = {s: last_chunk - chunk for s, (_, chunk) in backward_of.items()}
    pairs = {s for s in forward_of if s < stages - 1} | {s - 1 for s in backward_of if s > 0}
    wraps_forward = wraps_backward = 0
    if stages - 1 in forward_of and forward_of[stages - 1][1] < last_chunk:
        index = slot - stages + 1
        wraps_forward = index + _group_of(pipeline, table[index][0])
    if 0 in backward_of and backward_of[0][1] < last_chunk:
        index = slot - lead
        wraps_backward = lead - stages + 1 + index + _group_of(pipeline, table[index][0])
    return _Slot(
        forward=forward,
        backward=backward,
        forward_parts=_parts(stages, {s: chunk for s, (_, chunk) in forward_of.items()}),
        backward_parts=_parts(stages, backward_chunks),
        hidden_parts=_parts(stages, {s: c for s, c in backward_chunks.items() if s in forward_of}),
        steady=lead <= slot < total - 1,
        wraps_forward=wraps_forward,
        wraps_backward=wraps_backward,
        exchanges=runs(tuple(sorted(pairs)), 1),
        warmup_below=min(max(lead - slot, 0), stages),
        flush_below=min(max(slot - total + 1, 0), stages),
        late=next((s for s in forward_of if slot - s == total - 1 and lead - s == slot + 1), None),
        first=tuple((s, chunk) for s, (microbatch, chunk) in forward_of.items() if not microbatch),
        last=tuple((s, c) for s, c in backward_chunks.items() if backward_of[s][0] == last),
        sync=(backward_chunks[0],) if backward_of.get(0, (0,))[0] == last else (),
    )


def _parts(stages: int, chunks: dict[int, int]) -> tuple[tuple[slice, slice], ...]:
    """Slices of neighbouring stages with the same chunk, and of their rows `(chunk, stage)`."""
    return _parts_of(stages, tuple(chunks.items()))


@lru_cache(maxsize=1 << 14)
def _parts_of(stages: int, items: tuple[tuple[int, int], ...]) -> tuple[tuple[slice, slice], ...]:
    chunks = dict(items)  # a schedule repeats itself: so do these
    found = []
    for chunk in sorted(set(chunks.values())):
        for at in runs(tuple(s for s in sorted(chunks) if chunks[s] == chunk), 1):
            found.append((at, slice(chunk * stages + at.start, chunk * stages + at.stop)))
    return tuple(found)


def _group_of(pipeline: Pipeline, microbatch: int) -> int:
    """Micro-batches in the group of this one."""
    first = microbatch // pipeline.group * pipeline.group
    return min(pipeline.group, pipeline.microbatches - first)


def _present(low: int, high: int, stages: int) -> tuple[int, int]:
    start = min(max(low, 0), stages)
    return start, max(start, min(high + 1, stages))
