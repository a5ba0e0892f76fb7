"""Profiles: what one unit of a model adds to memory, read from a dry run of a few layers.

A model is a row of units: the embedding, decoder layers of a few kinds, multi-token prediction and
the head (final norm, output layer, loss). For one setting of everything but the pipeline, each
unit is measured once; `arrays` puts them together again for any pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tuner.memory import boundaries
from tuner.memory.categories import (
    CUBLAS_WORKSPACE,
    GRADIENTS,
    LOW_PRECISION_WEIGHTS,
    OPTIMIZER_STATE,
    PLACEHOLDER_GRADIENT,
    TRANSFORMER_ENGINE_WORKSPACE,
    WEIGHTS,
)
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
    most while it runs; `backward_change` (below zero as a rule) and `backward_peak` are the same of
    a backward pass. `kept` bytes stay on the device for good besides parameters, gradients and
    optimizer state, such as cached copies of weights in FP8.
    """

    forward_change: int
    forward_peak: int
    backward_change: int
    backward_peak: int
    kept: int
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
    step adds while it runs.
    """

    units: Mapping[str, UnitProfile]
    hidden_bytes: int
    placeholders: Mapping[str, Mapping[str, int]]
    chunk_bytes: int
    constant_bytes: int
    gradient_bytes_per_parameter: float
    state_bytes_per_parameter: float
    step_bytes_per_parameter: float
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepProfile:
        units = {name: UnitProfile(**unit) for name, unit in data["units"].items()}
        return cls(**{**data, "units": units})


def read_profile(
    trace: Trace,
    request: DryRunRequest,
    kinds: Sequence[str],
    shards: tuple[float, float],
    stated: Mapping[str, str],
) -> StepProfile:
    """The profile in a trace with boundaries.

    `kinds` names the kind of each layer, `shards` the ranks that share the optimizer state of dense
    and of expert parameters; `stated` is what the dry run stated, parameters by unit included.
    """
    versions = dict(stated)
    parameters: dict[str, list[int]] = json.loads(versions.pop("parameters"))
    placeholders: dict[str, dict[str, int]] = json.loads(versions.pop("placeholders"))
    own = json.loads(versions.pop("low_precision_weights"))
    windows = _Windows(trace, request.steps)
    held = _Held(trace, windows.start, len(kinds), own)
    units, shared = {}, {}
    for unit, spans in _spans(kinds, MTP in parameters).items():
        name = f"layer {spans.layer}" if spans.layer is not None else unit
        units[unit] = windows.unit(spans, held.units.get(name, 0), parameters.get(name, [0, 0, 0]))
        shared[unit] = dict(placeholders.get(name, {}))
    workspace = held.modules.get(CUBLAS_WORKSPACE, 0)
    if workspace:  # PyTorch's own products: the output layer, and routers
        for unit in units:
            if unit in (HEAD, MTP) or "experts" in unit.split():
                shared[unit][CUBLAS_WORKSPACE] = workspace
    dense, expert = (sum(counts[i] for counts in parameters.values()) for i in (0, 1))
    shares = dense / shards[0] + expert / shards[1]
    return StepProfile(
        units=units,
        hidden_bytes=_hidden_bytes(request),
        placeholders=shared,
        chunk_bytes=held.chunk,
        constant_bytes=held.rest + held.modules.get(TRANSFORMER_ENGINE_WORKSPACE, 0),
        gradient_bytes_per_parameter=held.categories[GRADIENTS] / (dense + expert),
        state_bytes_per_parameter=held.categories[OPTIMIZER_STATE] / shares,
        step_bytes_per_parameter=windows.step_peak / shares,
        versions=versions,
    )


@dataclass(frozen=True, slots=True)
class _Spans:
    """Markers around a unit's forward and backward pass; its layer number, where it is a layer."""

    forward: tuple[str, str]
    backward: tuple[str, str]
    layer: int | None = None


def _spans(kinds: Sequence[str], mtp: bool) -> dict[str, _Spans]:
    count = len(kinds)
    after_layers = boundaries.MTP_BACKWARD_END if mtp else boundaries.HEAD_BACKWARD_END
    head_start = boundaries.MTP_FORWARD_END if mtp else boundaries.layer_forward_end(count - 1)
    spans = {
        EMBEDDING: _Spans(
            (boundaries.FORWARD_START, boundaries.layer_forward_start(0)),
            (boundaries.layer_backward_end(0), boundaries.BACKWARD_END),
        ),
        HEAD: _Spans(
            (head_start, boundaries.FORWARD_END),
            (boundaries.BACKWARD_START, boundaries.HEAD_BACKWARD_END),
        ),
    }
    if mtp:
        spans[MTP] = _Spans(
            (boundaries.layer_forward_end(count - 1), boundaries.MTP_FORWARD_END),
            (boundaries.HEAD_BACKWARD_END, boundaries.MTP_BACKWARD_END),
        )
    for layer, kind in enumerate(kinds):  # the last of each kind stays
        after = layer + 1
        spans[kind] = _Spans(
            (boundaries.layer_forward_start(layer), boundaries.layer_forward_end(layer)),
            (
                after_layers if after == count else boundaries.layer_backward_end(after),
                boundaries.layer_backward_end(layer),
            ),
            layer,
        )
    return spans


def placeholder_bytes(placeholders: Mapping[str, Mapping[str, int]], units: Iterable[str]) -> int:
    """Bytes of the placeholder gradients of these units, equal shapes counted once."""
    together: dict[str, int] = {}
    for unit in units:
        together.update(placeholders.get(unit, {}))
    return sum(together.values())


_CHUNK_MODULES = ("rotary_pos_emb",)
_SHARED_MODULES = (CUBLAS_WORKSPACE, TRANSFORMER_ENGINE_WORKSPACE, PLACEHOLDER_GRADIENT)


class _Held:
    """What is alive before the passes of a step begin, in bytes.

    `categories` holds weights, gradients and optimizer state, `modules` what units share, `units`
    what each keeps besides (made in one of its passes), `chunk` what each model chunk keeps, and
    `rest` everything else.
    """

    def __init__(self, trace: Trace, event: int, layers: int, own: Sequence[int]) -> None:
        import numpy as np

        alive = trace.alive_at(event - 1)
        starts, running = _running_units(trace, layers)
        self.categories = dict.fromkeys((WEIGHTS, GRADIENTS, OPTIMIZER_STATE), 0)
        self.modules: dict[str, int] = {}
        self.units: dict[str, int] = {}
        self.chunk = self.rest = 0
        weights = set(own)
        for index in alive.tolist():
            size = -(-int(trace.bytes[index]) // BLOCK_BYTES) * BLOCK_BYTES
            category = trace.category_names[trace.category[index]]
            module = trace.module_names[trace.module[index]]
            unit = running[int(np.searchsorted(starts, index, side="right")) - 1]
            if int(trace.block[index]) in weights:
                self.categories[WEIGHTS] += size
            elif category in self.categories and module != LOW_PRECISION_WEIGHTS:
                self.categories[category] += size
            elif module in _SHARED_MODULES:
                self.modules[module] = self.modules.get(module, 0) + size
            elif module.split(".")[0] in _CHUNK_MODULES:
                self.chunk += size
            elif unit is not None:
                self.units[unit] = self.units.get(unit, 0) + size
            else:
                self.rest += size


def _running_units(trace: Trace, layers: int) -> tuple[NDArray[np.int64], list[str | None]]:
    """Which unit runs from each of these events on; None between passes."""
    import numpy as np

    after: dict[str, str | None] = {
        boundaries.FORWARD_START: EMBEDDING,
        boundaries.FORWARD_END: None,
        boundaries.BACKWARD_START: HEAD,
        boundaries.HEAD_BACKWARD_END: f"layer {layers - 1}",
        boundaries.BACKWARD_END: None,
        boundaries.MTP_FORWARD_END: HEAD,
    }
    mtp = any(name == boundaries.MTP_FORWARD_END for _, name in trace.markers)
    if mtp:
        after[boundaries.HEAD_BACKWARD_END] = MTP
        after[boundaries.MTP_BACKWARD_END] = f"layer {layers - 1}"
    for layer in range(layers):
        last = layer == layers - 1
        after[boundaries.layer_forward_start(layer)] = f"layer {layer}"
        after[boundaries.layer_forward_end(layer)] = (MTP if mtp else HEAD) if last else None
        after[boundaries.layer_backward_end(layer)] = f"layer {layer - 1}" if layer else EMBEDDING
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
    """Live bytes between the markers of the last micro-batch of the last step.

    `start` is the event at which its first pass begins, `step_peak` the most that is added after
    the last pass, by the optimizer for one.
    """

    def __init__(self, trace: Trace, steps: int) -> None:
        live = trace.live_bytes(BLOCK_BYTES)
        self._live: NDArray[np.int64] = live
        begin, end = trace.marker(step_start(steps)), trace.marker(step_end(steps))
        self._markers: dict[str, int] = {}
        self.start = end
        for event, name in trace.markers:
            if begin <= event <= end:
                self._markers[name] = event  # the last of each name stays
                if name == boundaries.FORWARD_START:
                    self.start = min(self.start, event)
        after = live[self._markers[boundaries.BACKWARD_END] : end]
        self.step_peak = max(0, int(after.max(initial=0)) - int(live[self.start - 1]))

    def unit(self, spans: _Spans, kept: int, counts: Sequence[int]) -> UnitProfile:
        change, peak = self._window(*spans.forward)
        backward_change, backward_peak = self._window(*spans.backward)
        return UnitProfile(change, peak, backward_change, backward_peak, kept, *map(int, counts))

    def _window(self, start: str, end: str) -> tuple[int, int]:
        """Change of live bytes over a window, and the most that was added in it."""
        first, last = self._markers[start], self._markers[end]
        before = int(self._live[first - 1])
        if last <= first:
            return 0, 0
        inside = self._live[first:last]
        return int(inside[-1]) - before, max(0, int(inside.max()) - before)
