"""Profiles: what one unit of a model adds to memory, read from a dry run of a few layers.

A model is a row of units: the embedding, decoder layers of a few kinds, multi-token prediction and
the head (final norm, output layer, loss). For one setting of everything but the pipeline, each
unit is measured once; `arrays` puts them together again for any pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.memory import markers
from tuner.memory.categories import (
    CUBLAS_WORKSPACE,
    GRADIENTS,
    LOW_PRECISION_WEIGHTS,
    OPTIMIZER_STATE,
    PLACEHOLDER_GRADIENT,
    TRANSFORMER_ENGINE_WORKSPACE,
    WEIGHTS,
)
from tuner.memory.composition.optimizer_step import bytes_per_parameter
from tuner.memory.composition.shards import Parameter, on_device
from tuner.memory.composition.split import EMBEDDING, HEAD, MTP
from tuner.memory.dryrun import BLOCK_BYTES
from tuner.memory.request import DryRunRequest
from tuner.memory.trace import Trace, step_end, step_start

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """Bytes of one unit for one micro-batch, and its parameters on one rank.

    A forward pass leaves `forward_change` more bytes than it found and adds `forward_peak` at
    most while it runs; `backward_change` (below zero as a rule) and `backward_peak` are the same
    of a backward pass. A layer's backward pass takes back what its forward pass added.

    `kept` bytes stay on the device for good besides parameters, gradients and optimizer state, such
    as cached copies of weights in FP8. `left` bytes stay from a backward pass to the unit's next
    forward pass, which is measured with them there: a layer of experts that was recomputed holds
    its input and its gradient through its routing probabilities (moe/token_dispatcher.py).
    `offloaded` of the bytes that a forward pass leaves go to the host where the layer is offloaded.
    `grouped` bytes are freed when the layers end that are recomputed with it: masks of dropout.
    """

    forward_change: int
    forward_peak: int
    backward_change: int
    backward_peak: int
    kept: int
    left: int
    offloaded: int
    grouped: int
    dense_parameters: int
    expert_parameters: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The units of a model under one setting, and what the optimizer adds for each parameter.

    `hidden_bytes` is the size of the tensor passed between units. `placeholders` holds, by unit,
    the bytes of what it shares with other units of the rank: placeholder gradients of its weights,
    by shape, and the workspace of PyTorch's matrix products. `chunk_bytes` stays on the device for
    each model chunk, `constant_bytes` for each rank. Bytes per parameter are those of a rank's own
    parameters for gradients, and of its share of them for the optimizer's state and for what its
    step adds while it runs, for all of them or for the group being updated. `fragmentation` is what
    PyTorch's allocator reserves beyond the peak, as a share of the bytes that passes hold then,
    with fixed and with expandable segments. `shapes` lists the parameters of each unit. `first` are
    the units as the first micro-batch of a step finds them, where that differs: it renews cached
    copies of weights, and some of them are gone until their next use.
    """

    units: Mapping[str, UnitProfile]
    first: Mapping[str, UnitProfile]
    hidden_bytes: int
    placeholders: Mapping[str, Mapping[str, int]]
    chunk_bytes: int
    constant_bytes: int
    gradient_bytes_per_parameter: float
    state_bytes_per_parameter: float
    step_bytes_per_parameter: float
    group_bytes_per_parameter: float
    fragmentation: float
    fragmentation_expandable: float
    shapes: Mapping[str, Sequence[Parameter]]
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepProfile:
        units, first = (
            {name: UnitProfile(**unit) for name, unit in data[key].items()}
            for key in ("units", "first")
        )
        shapes = {unit: tuple(map(tuple, found)) for unit, found in data["shapes"].items()}
        return cls(**{**data, "units": units, "first": first, "shapes": shapes})


def read_profile(
    trace: Trace,
    request: DryRunRequest,
    kinds: Sequence[str],
    shards: tuple[float, float],
    stated: Mapping[str, str],
) -> StepProfile:
    """The profile in a trace with markers.

    `kinds` names the kind of each layer, `shards` the ranks that share the optimizer state of dense
    and of expert parameters; `stated` is what the dry run stated, parameters by unit included.
    """
    versions = dict(stated)
    parameters: dict[str, list[int]] = json.loads(versions.pop("parameters"))
    placeholders: dict[str, dict[str, int]] = json.loads(versions.pop("placeholders"))
    own = json.loads(versions.pop("low_precision_weights"))
    by_name: dict[str, list[list[int]]] = json.loads(versions.pop("shapes"))
    windows, early = (_Windows(trace, request.steps, first=first) for first in (False, True))
    held = _Held(trace, windows.forward, len(kinds), own)
    units, renewing, shared, shapes = {}, {}, {}, {}
    moving = bool(request.config.get("cpu_offloading"))
    for unit, spans in _spans(kinds, mtp=MTP in parameters, moving=moving).items():
        name = f"layer {spans.layer}" if spans.layer is not None else unit
        after = windows.freed_after(spans, moving=moving)
        gone, grouped = (after, 0) if moving else (0, after)
        stays = (held.units.get(name, 0), held.left.get(name, 0), gone, grouped)
        units[unit], renewing[unit] = (
            found.unit(spans, stays, parameters.get(name, [0, 0, 0])) for found in (windows, early)
        )
        shared[unit] = dict(placeholders.get(name, {}))
        shapes[unit] = _parameters(by_name.get(name, ()))
    if moving:
        units = _without_moves(units, kinds[-1])
    for name, marker in _own_products(trace, kinds):
        shared.setdefault(name, {})[marker] = held.workspace
    for name, size in held.workspaces.items():
        unit = kinds[int(name.removeprefix("layer "))] if name.startswith("layer ") else name
        shared.setdefault(unit, {})[TRANSFORMER_ENGINE_WORKSPACE] = size
    dense, expert = (sum(counts[i] for counts in parameters.values()) for i in (0, 1))
    shares = dense / shards[0] + expert / shards[1]
    if request.config.get("optimizer_cpu_offload"):
        shares = _on_device(request, by_name, shards)
    by_all, by_group = bytes_per_parameter(trace, windows.step, windows.step_start, shares)
    return StepProfile(
        units=units,
        first=renewing if request.config.get("fp8") or request.config.get("fp4") else {},
        hidden_bytes=_hidden_bytes(request),
        placeholders=shared,
        chunk_bytes=held.chunk,
        constant_bytes=held.rest,
        gradient_bytes_per_parameter=held.categories[GRADIENTS] / (dense + expert),
        state_bytes_per_parameter=held.categories[OPTIMIZER_STATE] / shares,
        step_bytes_per_parameter=by_all,
        group_bytes_per_parameter=by_group,
        fragmentation=_fragmentation(trace, windows.held_bytes, expandable=False),
        fragmentation_expandable=_fragmentation(trace, windows.held_bytes, expandable=True),
        shapes=shapes,
        versions=versions,
    )


def _on_device(
    request: DryRunRequest, shapes: Mapping[str, list[list[int]]], shards: tuple[float, float]
) -> float:
    """Parameters whose optimizer state a rank of the dry run holds on its device."""
    names = sorted(shapes, key=_order_of_units)
    parameters = [item for name in names for item in _parameters(shapes[name])]
    config = request.config
    return on_device(
        [parameters],
        (int(shards[0]), int(shards[1])),
        float(config["optimizer_offload_fraction"]),
        sharded=bool(config.get("use_distributed_optimizer")),
        bucketed=bool(config.get("overlap_grad_reduce")),
    )


def _parameters(rows: Sequence[Sequence[int]]) -> tuple[Parameter, ...]:
    return tuple((size, flat, expert, words) for size, flat, expert, words in rows)


def _order_of_units(name: str) -> tuple[int, int]:
    if name.startswith("layer "):
        return 1, int(name.removeprefix("layer "))
    return {EMBEDDING: 0, MTP: 3}.get(name, 2), 0


def _without_moves(units: Mapping[str, UnitProfile], last: str) -> dict[str, UnitProfile]:
    """The units without what left for the host, or came back, in their windows.

    All layers but the last are offloaded: one leaves after the last layer, in the window of what
    follows, and one comes back in the backward window of every layer.
    """
    moved = units[last].offloaded
    after = MTP if MTP in units else HEAD
    changed = {
        name: replace(unit, backward_peak=unit.backward_peak - unit.offloaded)
        for name, unit in units.items()
    }
    changed[after] = replace(
        units[after],
        forward_change=units[after].forward_change + moved,
        forward_peak=units[after].forward_peak + moved,
    )
    return changed


@dataclass(frozen=True, slots=True)
class _Spans:
    """Markers around a unit's forward and backward pass; its layer number, where it is a layer.

    The forward pass of a layer lasts until the next unit starts, or, while layers move to the
    host, until its own end.
    """

    forward: tuple[str, str]
    backward: tuple[str, str]
    layer: int | None = None


def _spans(kinds: Sequence[str], *, mtp: bool, moving: bool) -> dict[str, _Spans]:
    count = len(kinds)
    last_end = markers.layer_forward_end(count - 1) if moving else markers.LAYERS_FORWARD_END
    after_layers = markers.MTP_BACKWARD_END if mtp else markers.HEAD_BACKWARD_END
    head_start = markers.MTP_FORWARD_END if mtp else last_end
    spans = {
        EMBEDDING: _Spans(
            (markers.FORWARD_START, markers.layer_forward_start(0)),
            (markers.layer_backward_end(0), markers.BACKWARD_END),
        ),
        HEAD: _Spans(
            (head_start, markers.FORWARD_END),
            (markers.BACKWARD_START, markers.HEAD_BACKWARD_END),
        ),
    }
    if mtp:
        spans[MTP] = _Spans(
            (last_end, markers.MTP_FORWARD_END),
            (markers.HEAD_BACKWARD_END, markers.MTP_BACKWARD_END),
        )
    for layer, kind in enumerate(kinds):
        if kinds[:layer].count(kind) != 1:  # the second of each kind is typical
            continue
        after = layer + 1
        own_end = markers.layer_forward_end(layer)
        next_start = last_end if after == count else markers.layer_forward_start(after)
        spans[kind] = _Spans(
            (markers.layer_forward_start(layer), own_end if moving else next_start),
            (
                after_layers if after == count else markers.layer_backward_end(after),
                markers.layer_backward_end(layer),
            ),
            layer,
        )
    return spans


def _fragmentation(trace: Trace, held_bytes: int, *, expandable: bool) -> float:
    """Bytes reserved beyond the peak for each byte allocated above `held_bytes` at the peak."""
    from tuner.memory.allocator_replay import replay
    from tuner.memory.allocator_settings import AllocatorSettings

    run = replay(trace, AllocatorSettings(expandable_segments=expandable))
    beyond = run.peak_reserved_bytes - run.peak_allocated_bytes
    return beyond / max(1, run.peak_allocated_bytes - held_bytes)


def placeholder_bytes(placeholders: Mapping[str, Mapping[str, int]], units: Iterable[str]) -> int:
    """Bytes of the placeholder gradients of these units, equal shapes counted once."""
    together: dict[str, int] = {}
    for unit in units:
        together.update(placeholders.get(unit, {}))
    return sum(together.values())


_OPTIMIZER_PHASE = "optimizer"
_CHUNK_MODULES = ("rotary_pos_emb",)


class _Held:
    """What is alive before the passes of a micro-batch begin, in bytes.

    `categories` holds weights, gradients and optimizer state, `workspace` is the size of one of
    PyTorch's workspaces for matrix products, `workspaces` what units have of Transformer Engine's
    beyond the first one (for grouped products), `units` what each unit keeps besides (made in one
    of its passes), `left` what each frees in its next pass, `chunk` what each model chunk keeps,
    and `rest` everything else but placeholder gradients.
    """

    def __init__(
        self, trace: Trace, forward: tuple[int, int], layers: int, own: Sequence[int]
    ) -> None:
        import numpy as np

        start, forward_end = forward
        alive = trace.alive_at(start - 1)
        starts, running = _running_units(trace, layers)
        self.categories = dict.fromkeys((WEIGHTS, GRADIENTS, OPTIMIZER_STATE), 0)
        self.workspace = 0
        self.units: dict[str, int] = {}
        self.left: dict[str, int] = {}
        self.workspaces: dict[str, int] = {}
        self.rest_has_workspace = False
        self.chunk = self.rest = 0
        weights = set(own)
        ends = {int(trace.block[i]): i for i in np.flatnonzero(trace.bytes < 0).tolist()}
        for index in alive.tolist():
            size = -(-int(trace.bytes[index]) // BLOCK_BYTES) * BLOCK_BYTES
            category = trace.category_names[trace.category[index]]
            module = trace.module_names[trace.module[index]]
            unit = running[int(np.searchsorted(starts, index, side="right")) - 1]
            end = ends.get(int(trace.block[index]), len(trace))
            freed = running[int(np.searchsorted(starts, end, side="right")) - 1]
            if end < forward_end and freed is not None:
                self.left[freed] = self.left.get(freed, 0) + size
            elif int(trace.block[index]) in weights:
                self.categories[WEIGHTS] += size
            elif category in self.categories and module != LOW_PRECISION_WEIGHTS:
                self.categories[category] += size
            elif module == CUBLAS_WORKSPACE:
                self.workspace = size
            elif module == PLACEHOLDER_GRADIENT:
                continue
            elif module.split(".")[0] in _CHUNK_MODULES:
                self.chunk += size
            elif module == TRANSFORMER_ENGINE_WORKSPACE and unit and self.rest_has_workspace:
                self.workspaces[unit] = self.workspaces.get(unit, 0) + size
            elif module == TRANSFORMER_ENGINE_WORKSPACE:
                self.rest_has_workspace = True
                self.rest += size
            elif unit is not None:
                self.units[unit] = self.units.get(unit, 0) + size
            elif trace.phase_names[trace.phase[index]] == _OPTIMIZER_PHASE:
                self.categories[OPTIMIZER_STATE] += size  # until its next step, such as gradients
            else:
                self.rest += size


def _own_products(trace: Trace, kinds: Sequence[str]) -> set[tuple[str, str]]:
    """The units in which PyTorch multiplies matrices itself, and on which thread."""
    import numpy as np

    names = set(markers.OWN_PRODUCT.values())
    starts, running = _running_units(trace, len(kinds))
    found = set()
    for event, marker in trace.markers:
        if marker in names:
            unit = running[int(np.searchsorted(starts, event, side="right")) - 1]
            if unit is not None:
                layer = unit.removeprefix("layer ")
                found.add((kinds[int(layer)] if layer != unit else unit, marker))
    return found


def _running_units(trace: Trace, layers: int) -> tuple[NDArray[np.int64], list[str | None]]:
    """Which unit runs from each of these events on; None between passes."""
    import numpy as np

    after: dict[str, str | None] = {
        markers.FORWARD_START: EMBEDDING,
        markers.FORWARD_END: None,
        markers.BACKWARD_START: HEAD,
        markers.HEAD_BACKWARD_END: f"layer {layers - 1}",
        markers.BACKWARD_END: None,
        markers.MTP_FORWARD_END: HEAD,
    }
    mtp = any(name == markers.MTP_FORWARD_END for _, name in trace.markers)
    if mtp:
        after[markers.HEAD_BACKWARD_END] = MTP
        after[markers.MTP_BACKWARD_END] = f"layer {layers - 1}"
    for layer in range(layers):
        last = layer == layers - 1
        after[markers.layer_forward_start(layer)] = f"layer {layer}"
        after[markers.layer_forward_end(layer)] = (MTP if mtp else HEAD) if last else None
        after[markers.layer_backward_end(layer)] = f"layer {layer - 1}" if layer else EMBEDDING
    known = [(event, after[name]) for event, name in trace.markers if name in after]
    starts = np.array([0, *(event for event, _ in known)], dtype=np.int64)
    return starts, [None, *(unit for _, unit in known)]


def _hidden_bytes(request: DryRunRequest) -> int:
    config = request.config
    tokens = request.seq_length * int(config.get("micro_batch_size", 1))
    tokens //= int(config.get("context_parallel_size") or 1)
    if config.get("sequence_parallel"):
        tokens //= int(config.get("tensor_model_parallel_size") or 1)
    wide = request.precision == "fp32" or config.get("fp32_residual_connection")
    return tokens * int(request.model["hidden_size"]) * (4 if wide else 2)


class _Windows:
    """Live bytes between the markers of the last micro-batch of the last step, or of its first.

    `forward` are the events at which its forward pass begins and ends, `held_bytes` is what is
    alive before, `step` what is added after the last pass, by the optimizer for one, `[event]` from
    `step_start` on.
    """

    def __init__(self, trace: Trace, steps: int, *, first: bool) -> None:
        live = trace.live_bytes(BLOCK_BYTES)
        self._live: NDArray[np.int64] = live
        begin, end = trace.marker(step_start(steps)), trace.marker(step_end(steps))
        self._markers: dict[str, int] = {}
        for event, name in trace.markers:
            if begin <= event <= end and not (first and name in self._markers):
                self._markers[name] = event
        self.forward = (
            self._markers[markers.FORWARD_START],
            self._markers[markers.FORWARD_END],
        )
        self.held_bytes = int(live[self.forward[0] - 1])
        self.step_start = self._markers[markers.BACKWARD_END]
        self.step: NDArray[np.int64] = live[self.step_start : end] - self.held_bytes

    def unit(
        self, spans: _Spans, stays: tuple[int, int, int, int], counts: Sequence[int]
    ) -> UnitProfile:
        change, peak = self._window(*spans.forward)
        backward_change, backward_peak = self._window(*spans.backward)
        if spans.layer is not None:  # first and last layers share tensors with their neighbours
            backward_change = -change
        return UnitProfile(change, peak, backward_change, backward_peak, *stays, *map(int, counts))

    def freed_after(self, spans: _Spans, *, moving: bool) -> int:
        """What is freed between the end of a layer and the start of what follows."""
        if spans.layer is None:
            return 0
        start, end = spans.forward
        if moving:
            end = markers.layer_forward_start(spans.layer + 1)
        own_end = markers.layer_forward_end(spans.layer)
        return self._window(start, own_end)[0] - self._window(start, end)[0]

    def _window(self, start: str, end: str) -> tuple[int, int]:
        """Change of live bytes over a window, and the most that was added in it."""
        first, last = self._markers[start], self._markers[end]
        before = int(self._live[first - 1])
        if last <= first:
            return 0, 0
        inside = self._live[first:last]
        return int(inside[-1]) - before, max(0, int(inside.max()) - before)
