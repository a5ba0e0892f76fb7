"""Pipeline schedules: micro-batches in flight, and tensors under way between stages.

Read from megatron/core/pipeline_parallel/schedules.py: 1F1B for one model chunk per rank,
interleaved 1F1B for more (`get_pp_rank_microbatches`, `get_schedule_table`), with the lifetimes
of their local variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the order of a rank's passes.

    `group` counts the micro-batches a chunk runs in a row; `overlapped` says whether transfers
    between stages overlap with passes (`overlap_p2p_comm`), `freed` whether outputs are let go
    once sent (`deallocate_pipeline_outputs`).
    """

    stages: int
    chunks: int
    microbatches: int
    group: int
    overlapped: bool
    freed: bool = True


@dataclass(frozen=True, slots=True)
class Moment:
    """A state of one rank in which a pass starts, or in which tensors are exchanged.

    `in_flight` counts, for each chunk of the rank, the micro-batches whose forward pass has ended
    and whose backward pass has not, the one running a backward pass included. `buffers` counts
    tensors of the size passed between stages that are alive besides: received and not yet used,
    sent and not yet freed. `left` says of each chunk whether its last pass was a backward one, in
    this step. `forward` is None where no pass runs.
    """

    forward: bool | None
    chunk: int
    in_flight: tuple[int, ...]
    buffers: int
    left: tuple[bool, ...]


@lru_cache(maxsize=65536)
def moments(shape: Shape, stage: int, with_left: bool = True) -> tuple[Moment, ...]:
    """The states of a rank over a step that no other state of the same kind exceeds.

    Without `with_left` states that differ in `Moment.left` only count as the same.
    """
    found: dict[tuple[bool | None, int], set[tuple[int, ...]]] = {}
    rank = _Rank(shape, stage)
    passes = rank.interleaved() if shape.chunks > 1 else rank.plain()
    for moment in passes:
        key = (moment.forward, moment.chunk)
        left = moment.left if with_left else ()
        found.setdefault(key, set()).add((*moment.in_flight, moment.buffers, *left))
    count = shape.chunks
    return tuple(
        Moment(forward, chunk, state[:count], state[count], tuple(map(bool, state[count + 1 :])))
        for (forward, chunk), states in found.items()
        for state in _largest(states)
    )


def steady_microbatches(microbatches: int, stages: int, group: int) -> int:
    """Fewest micro-batches of a step that pass through the same states."""
    enough = 3 * max(stages, group)
    if microbatches <= enough + group:
        return microbatches
    return enough + group - (enough - microbatches) % group if group > 1 else enough


def _largest(states: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The tuples that no other one reaches or exceeds in every place."""
    kept: list[tuple[int, ...]] = []
    for state in sorted(states, key=sum, reverse=True):
        if not any(all(a >= b for a, b in zip(other, state, strict=True)) for other in kept):
            kept.append(state)
    return kept


@dataclass(slots=True)
class _Variable:
    """The input that is received last in warm-up: with overlapped transfers the schedule's variable
    for it is not assigned again, and holds it, and its gradient, until the step ends.

    `backwards` counts the passes of `chunk` up to its own backward pass, `forwards` those from its
    own forward pass on.
    """

    chunk: int
    backwards: int
    forwards: int = 0
    just: bool = False  # its backward pass was the last one: the gradient is counted as sent

    def after_backward(self, chunk: int) -> None:
        self.backwards -= chunk == self.chunk
        self.just = chunk == self.chunk and self.backwards == 0

    def holds(self, in_flight: list[int]) -> int:
        """Tensors that nothing else holds."""
        lingers = self.forwards == 1 and not in_flight[self.chunk]  # `_Rank._lingering`
        return 0 if self.backwards > 0 or lingers else 2 - self.just


@dataclass(slots=True)
class _Rank:
    """Follows one rank through a step; tensors between stages are counted, not named."""

    shape: Shape
    stage: int
    in_flight: list[int] = field(default_factory=list)
    left: list[bool] = field(default_factory=list)
    inputs: int = 0  # received, forward pass to come
    gradients: int = 0  # received, backward pass to come
    output: int = 0  # of the last forward pass, not freed yet
    input_gradient: int = 0  # of the last backward pass
    output_gradient: int = 0  # held by the variable of the last backward pass
    last: int = -1  # the chunk of the last backward pass
    variable: _Variable | None = None

    def __post_init__(self) -> None:
        self.in_flight = [0] * self.shape.chunks
        self.left = [False] * self.shape.chunks

    def _moment(self, forward: bool | None, chunk: int, extra: int = 0) -> Moment:
        buffers = self.inputs + self.gradients + self.output + self.input_gradient
        buffers += self.output_gradient + extra + self._lingering(chunk)
        if self.variable is not None:
            buffers += self.variable.holds(self.in_flight)
        found = Moment(forward, chunk, tuple(self.in_flight), buffers, tuple(self.left))
        if forward is not None:
            self.left[chunk] = not forward
        return found

    def _lingering(self, running: int) -> int:
        """Inputs and their gradients that model chunks hold until they get the next input.

        transformer/transformer_block.py `set_input_tensor`.
        """
        return sum(
            self._takes_input(chunk) * (1 + (chunk != self.last))
            for chunk, count in enumerate(self.in_flight)
            if not count and chunk != running
        )

    def _takes_input(self, chunk: int) -> bool:
        return not (self.stage == 0 and chunk == 0)

    def _gives_output(self, chunk: int) -> bool:
        return not (self.stage == self.shape.stages - 1 and chunk == self.shape.chunks - 1)

    def plain(self) -> Iterator[Moment]:
        """One chunk: `forward_backward_pipelining_without_interleaving`."""
        takes, gives = self._takes_input(0), self._gives_output(0)
        count = self.shape.microbatches
        warmup = min(self.shape.stages - self.stage - 1, count)
        for _ in range(warmup):
            self.inputs = int(takes)
            yield self._moment(True, 0)
            self.inputs = 0
            self.in_flight[0] += 1
            yield self._moment(None, 0, int(gives))
        for step in range(count - warmup):
            self.inputs = int(takes)
            # From the second on the output of the last backward pass leads to its input.
            yield self._moment(True, 0, int(takes and step > 0))
            self.inputs = 0
            self.in_flight[0] += 1
            yield self._moment(None, 0, 2 * gives)  # output on its way, gradient received
            self.output_gradient = int(gives)
            yield self._moment(False, 0)
            self.in_flight[0] -= 1
            self.input_gradient = int(takes)
        for _ in range(warmup):
            self.output_gradient = int(gives)
            yield self._moment(False, 0)
            self.in_flight[0] -= 1
            self.input_gradient = int(takes)

    def interleaved(self) -> Iterator[Moment]:
        """Several chunks: `forward_backward_pipelining_with_interleaving`."""
        shape, order = self.shape, _order(self.shape)
        total = len(order)
        warmup = (shape.stages - self.stage - 1) * 2 + (shape.chunks - 1) * shape.group
        warmup = min(warmup, total)
        self.inputs += self._takes_input(0)
        for step in range(warmup):
            yield from self._forward(order[step])
            self.inputs += step < total - 1 and self._receives(step, order, True)
            yield self._moment(None, order[step])
            self.output = 0
        self.gradients += self._gives_output(shape.chunks - 1)
        if shape.overlapped and warmup < total and self._receives(warmup - 1, order, True):
            self.variable = _Variable(order[warmup], self.in_flight[order[warmup]] + 1)
        for step in range(total - warmup):
            forward, backward = order[step + warmup], shape.chunks - 1 - order[step]
            last = step == total - warmup - 1
            if shape.overlapped:
                self.output = 0
                yield from self._forward(forward)
                self.inputs += not last and self._receives(step + warmup, order, True)
                yield from self._backward(backward)
                self.gradients += self._receives(step, order, False)
            else:
                yield from self._forward(forward)
                yield from self._backward(backward)
                self.inputs += not last and self._receives(step + warmup, order, True)
                self.gradients += self._receives(step, order, False)
                yield self._moment(None, forward)
                self.output = 0
        self.output = 0
        for step in range(total - warmup, total):
            yield from self._backward(shape.chunks - 1 - order[step])
            self.gradients += step < total - 1 and self._receives(step, order, False)

    def _forward(self, chunk: int) -> Iterator[Moment]:
        yield self._moment(True, chunk)
        self.inputs -= self._takes_input(chunk)
        self.in_flight[chunk] += 1
        if self.variable is not None and chunk == self.variable.chunk:
            self.variable.forwards += 1
        self.output = int(self._gives_output(chunk) and self.shape.freed)

    def _backward(self, chunk: int) -> Iterator[Moment]:
        yield self._moment(False, chunk)
        self.gradients -= self._gives_output(chunk)
        self.in_flight[chunk] -= 1
        self.last = chunk
        if self.variable is not None:
            self.variable.after_backward(chunk)
        self.input_gradient = int(self._takes_input(chunk))

    def _receives(self, step: int, order: list[int], forward: bool) -> bool:
        """Whether a tensor arrives after pass `step` (`recv_tensor_from_previous_stage`)."""
        shape = self.shape
        last_chunk = shape.chunks - 1 if forward else 0
        leads = self.stage == (0 if forward else shape.stages - 1)
        if not leads:
            return True
        if step < shape.stages - 1:
            return False
        chunk = order[step - (shape.stages - 1)]
        return (chunk if forward else shape.chunks - 1 - chunk) != last_chunk


def _order(shape: Shape) -> list[int]:
    """The chunk of each forward pass: groups of micro-batches, chunk by chunk."""
    order = []
    for first in range(0, shape.microbatches, shape.group):
        group = min(shape.group, shape.microbatches - first)
        for chunk in range(shape.chunks):
            order += [chunk] * group
    return order
