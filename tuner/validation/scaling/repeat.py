"""A trace of few layers made into one of many.

The layers of a stage are alike, and so are their allocations. A run of five layers shows what a
layer allocates and frees between two of its like; the middle one is repeated as often as needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tuner.memory.kernel_log import KernelLog
from tuner.memory.trace import Trace

RECORDED = 5
"""Layers of a recorded stage that stands for a longer one."""

_BEFORE, _MIDDLE, _AFTER = 1, 2, 3
"""The repeated layer and its neighbours among the recorded ones, as data flows forward."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Events `start` to `end` of a trace: one pass of recorded layer `layer`, either direction."""

    layer: int
    backward: bool
    start: int
    end: int


def repeated(trace: Trace, segments: list[Segment], copies: int) -> Trace:
    """`trace` with the middle layer there `copies` times; its kernels are left out.

    `segments` are the passes of all recorded layers in time order. Raises ValueError where the
    middle layers did not do alike.
    """
    return _Repeater(trace, segments, copies).run()


class _Repeater:
    def __init__(self, trace: Trace, segments: list[Segment], copies: int) -> None:
        self._trace, self._segments, self._copies = trace, segments, copies
        self._block, self._bytes = trace.block.tolist(), trace.bytes.tolist()
        self._count = max(self._block, default=-1) + 1
        self._maker = {
            self._block[event]: segment.layer
            for segment in segments
            for event in range(segment.start, segment.end)
            if self._bytes[event] > 0
        }

    def run(self) -> Trace:
        import numpy as np

        events: list[tuple[int, int, int]] = []  # block, bytes, the event it stands for
        new_place = [0] * (len(self._block) + 1)
        done = 0
        for place, segment in enumerate(self._segments):
            if segment.layer not in (_BEFORE, _MIDDLE, _AFTER):
                continue
            for event in range(done, segment.start):
                new_place[event] = len(events)
                events += self._outside(event)
            new_place[segment.start : segment.end] = [len(events)] * (segment.end - segment.start)
            events += self._pass(place)
            done = segment.end
        for event in range(done, len(self._block)):
            new_place[event] = len(events)
            events += self._outside(event)
        new_place[-1] = len(events)
        rows = np.array(events, dtype=np.int64).reshape(-1, 3)
        trace = self._trace
        return replace(
            trace,
            block=rows[:, 0],
            bytes=rows[:, 1],
            module=trace.module[rows[:, 2]],
            phase=trace.phase[rows[:, 2]],
            category=trace.category[rows[:, 2]],
            markers=tuple((new_place[event], name) for event, name in trace.markers),
            kernels=KernelLog.empty(),
            kernel_markers=np.zeros(0, dtype=np.int64),
        )

    def _outside(self, event: int) -> Iterator[tuple[int, int, int]]:
        """An event outside the passes: of all copies where the middle layer made the block."""
        block, size = self._block[event], self._bytes[event]
        if self._maker.get(block) != _MIDDLE:
            yield block, size, event
            return
        for number in range(1, self._copies + 1):
            yield self._numbered(block, number), size, event

    def _pass(self, place: int) -> Iterator[tuple[int, int, int]]:
        segment = self._segments[place]
        if segment.layer != _MIDDLE:
            inner = self._copies if segment.layer == _AFTER else 1
            for event in range(segment.start, segment.end):
                block, size = self._block[event], self._bytes[event]
                if self._maker.get(block) == _MIDDLE:
                    block = self._numbered(block, inner)
                yield block, size, event
            return
        around = self._segments[place - 1], self._segments[place + 1]
        before, after = reversed(around) if segment.backward else around
        for side in around:
            if side.end - side.start != segment.end - segment.start:
                raise ValueError("the middle layers did not do alike")
        numbers = range(1, self._copies + 1)
        for number in reversed(numbers) if segment.backward else numbers:
            for offset in range(segment.end - segment.start):
                event = segment.start + offset
                block = self._in_copy(number, event, before.start + offset, after.start + offset)
                yield block, self._bytes[event], event

    def _in_copy(self, number: int, event: int, before: int, after: int) -> int:
        """The block of an event in copy `number`; the neighbours' like events show what it frees
        of a neighbouring copy."""
        block = self._block[event]
        maker = self._maker.get(block)
        if maker == _MIDDLE:
            return self._numbered(block, number)
        if maker == _BEFORE:
            alike = self._block[after], number - 1
        elif maker == _AFTER:
            alike = self._block[before], number + 1
        elif number == 1:
            return block
        else:
            raise ValueError("the middle layers free what no neighbour made")
        if not 1 <= alike[1] <= self._copies:
            return block
        if self._maker.get(alike[0]) != _MIDDLE:
            raise ValueError("the middle layers did not do alike")
        return self._numbered(*alike)

    def _numbered(self, block: int, number: int) -> int:
        return self._count + block * self._copies + number - 1
