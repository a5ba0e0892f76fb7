"""Seconds of one forward or backward pass of a unit, and what they are spent on.

The device runs kernels one after another, each after a small gap. A collective that the next
operation waits for adds its time; one that runs beside the following product adds what is left
when that product has ended. The host launches kernels ahead of the device; where it is slower than
the device, its time is the pass's. CUDA graphs take the kernels of their scopes off the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.candidate import Candidate
from tuner.hardware import Gpu
from tuner.memory.kernel_log import GROUPS, KIND, OPERATIONS, KernelLog
from tuner.timing import collectives
from tuner.timing.kernels import device_seconds
from tuner.timing.rates import Rates
from tuner.timing.topology import Links, Span, group_span
from tuner.timing.units import SCOPES, UnitKernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]

PARTS = ("compute", "recompute", "tensor", "context", "expert", "data", "host")
"""What the seconds of a pass are spent on: kernels, kernels and collectives of recompute, exposed
communication of tensor, context, expert and (with fully sharded weights) data parallelism, and
waiting for the host."""

_PART_OF_GROUP = {"cp": "context", "ep": "expert", "tp-ep": "expert", "etp": "expert"}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What of a candidate changes the time of a pass besides its kernels.

    `graphed` are the captured parts of a layer (`SCOPES`), `whole` says that the host launches
    nothing (full-iteration graphs). `dispatcher` is "alltoall", "deepep" or "hybridep".
    `fused_experts` says that activation and quantisation are part of the experts' products.
    """

    graphed: frozenset[str]
    whole: bool
    userbuffers: bool
    dispatcher: str
    topk: int
    fused_experts: bool

    @classmethod
    def of(cls, candidate: Candidate, topk: int) -> Surroundings:
        extra = dict(candidate.extra)
        flex = extra.get("moe_token_dispatcher_type") == "flex"
        backend = extra.get("moe_flex_dispatcher_backend") or "deepep"
        return cls(
            graphed=_graphed(candidate),
            whole=candidate.cuda_graph_impl == "full_iteration",
            userbuffers=bool(extra.get("tp_comm_overlap")),
            dispatcher=str(backend) if flex else "alltoall",
            topk=topk,
            fused_experts=bool(
                extra.get("use_transformer_engine_op_fuser")
                and extra.get("moe_mlp_glu_interleave_size")
            ),
        )


def _graphed(candidate: Candidate) -> frozenset[str]:
    """The scopes that graphs of layers capture; without names, the whole layer."""
    if candidate.cuda_graph_impl not in ("local", "transformer_engine"):
        return frozenset()
    return frozenset(candidate.cuda_graph_modules) or frozenset(SCOPES)


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU with its links and what it sustains.

    `cores` is set where the ranks are processes of one machine that share its cores.
    """

    gpu: Gpu
    links: Links
    rates: Rates
    world_size: int
    cores: int | None = None


def pass_seconds(
    unit: UnitKernels,
    forward: bool,
    candidate: Candidate,
    around: Surroundings,
    machine: Machine,
) -> Seconds:
    """Seconds of one pass by part, `[PARTS]`."""
    log = unit.forward if forward else unit.backward
    rates = machine.rates
    graphed = _graphed_rows(unit, forward, around)
    device = device_seconds(log, machine.gpu, rates)
    _fused_permutation(log, device, around)
    _fused_experts(log, device, around)
    gap = np.where(graphed, rates.graph_gap_s, rates.kernel_gap_s)
    on_device = _on_device(log)
    device = device + gap * on_device
    parts = dict.fromkeys(PARTS, 0.0)
    repeated = np.zeros(len(log), dtype=bool) if forward else unit.recomputed
    parts["compute"] = float(device[~repeated].sum())
    parts["recompute"] = float(device[repeated].sum())
    exposed = _exposed(log, device, candidate, around, machine)
    for row, part, seconds in exposed:
        parts["recompute" if repeated[row] else part] += seconds
    total = sum(parts.values())
    host = _host_seconds(log, graphed, around, rates)
    parts["host"] = max(0.0, host - total)
    return np.array([parts[name] for name in PARTS])


def _on_device(log: KernelLog) -> NDArray[np.bool_]:
    away = [KIND["collective"], KIND["host_memory"], KIND["synchronize"]]
    return ~np.isin(log.kind, away)


def _graphed_rows(unit: UnitKernels, forward: bool, around: Surroundings) -> NDArray[np.float64]:
    """Share of each operation that graphs launch.

    Backward operations are not filed by module: they take the share of the forward pass.
    """
    log = unit.forward if forward else unit.backward
    if around.whole:
        return np.ones(len(log))
    captured = np.array([name in around.graphed for name in SCOPES])
    share = captured[unit.scope].astype(np.float64)
    if forward:
        return share
    launches = _launches(unit.forward)
    mean = float((share * launches).sum() / max(launches.sum(), 1e-9))
    return np.full(len(log), mean)


_LAUNCH_WEIGHT = {
    # host work in units of one plain kernel launch: layers of Transformer Engine do more in Python
    "gemm": 5.0,
    "grouped_gemm": 5.0,
    "attention_forward": 8.0,
    "attention_backward": 6.0,
    "quantize": 2.0,
    "permute": 3.0,
    "collective": 3.0,
    "host_copy": 2.0,
    "synchronize": 4.0,
    "host_memory": 0.0,
}


def _launches(log: KernelLog) -> NDArray[np.float64]:
    """Host work of each operation, in kernel launches."""
    weights = np.ones(len(log))
    for kind, weight in _LAUNCH_WEIGHT.items():
        weights[log.kind == KIND[kind]] = weight
    return weights


def _host_seconds(
    log: KernelLog,
    graphed: NDArray[np.float64],
    around: Surroundings,
    rates: Rates,
) -> float:
    """Host work of a pass: launches, each local expert of a grouped product, and graphs."""
    if around.whole:
        return 0.0
    graphs = len(around.graphed) if graphed.any() else 0
    experts = np.where(log.kind == KIND["grouped_gemm"], log.batch, 0)
    each = _launches(log) * rates.host_kernel_s + experts * rates.host_expert_s
    return float((each * (1.0 - graphed)).sum()) + graphs * rates.graph_launch_s


def _fused_permutation(log: KernelLog, device: Seconds, around: Surroundings) -> None:
    """Flexible dispatchers move rows into place while they exchange them.

    DeepEP leaves one of the two permutations on each side, HybridEP none
    (megatron/core/transformer/moe/fused_a2a.py).
    """
    left = {"alltoall": 1.0, "deepep": 0.5}.get(around.dispatcher, 0.0)
    device[log.kind == KIND["permute"]] *= left


def _fused_experts(log: KernelLog, device: Seconds, around: Surroundings) -> None:
    """One operation for both layers of the experts and what lies between them.

    Transformer Engine's grouped MLP (pytorch/ops/fused) with gates and values interleaved.
    """
    products = np.flatnonzero(log.kind == KIND["grouped_gemm"])
    if not around.fused_experts or not len(products):
        return
    between = np.zeros(len(log), dtype=bool)
    between[products[0] : products[-1]] = True
    device[between & np.isin(log.kind, [KIND["memory"], KIND["quantize"]])] = 0.0


def _exposed(
    log: KernelLog,
    device: Seconds,
    candidate: Candidate,
    around: Surroundings,
    machine: Machine,
) -> list[tuple[int, str, float]]:
    """(row, part, seconds the device waits) of each collective."""
    found = []
    rates = machine.rates
    rows = np.flatnonzero(log.kind == KIND["collective"])
    for row in rows.tolist():
        name = GROUPS[log.group[row]]
        span = group_span(
            name, int(log.group_size[row]), candidate, machine.links, machine.world_size
        )
        operation = OPERATIONS[log.op[row]]
        size = float(log.bytes[row])
        part = _PART_OF_GROUP.get(name, "tensor")
        if operation == "all_to_all" and part == "expert":
            size *= _once_per_rank(span, around)
        seconds = float(collectives.seconds(operation, size, span, machine.links, rates))
        beside = bool(log.asynchronous[row])
        if part == "tensor" and around.userbuffers and seconds > rates.link_latency_s:
            seconds *= 1.0 - rates.userbuffers_hidden
        elif beside:
            cover = _next_kernel(log, device, row)
            hidden = min(seconds, cover)
            seconds = seconds - hidden + rates.contention * hidden
        found.append((row, part, seconds))
    return found


def _next_kernel(log: KernelLog, device: Seconds, row: int) -> float:
    """Device seconds of the first large operation after `row`."""
    large = np.isin(log.kind[row + 1 :], _LARGE)
    position = int(large.argmax()) if large.any() else -1
    return float(device[row + 1 + position]) if position >= 0 else 0.0


_LARGE = [KIND[k] for k in ("gemm", "grouped_gemm", "attention_forward", "attention_backward")]


def _once_per_rank(span: Span, around: Surroundings) -> float:
    """Share of the rows that are sent where each token goes to a rank only once.

    Of `topk` experts drawn evenly from n ranks, n (1 - (1 - 1/n)^topk) lie on different ones.
    Between domains flexible dispatchers send a token once for each domain.
    """
    if around.dispatcher == "alltoall" or around.topk < 1:
        return 1.0
    places = span.domains if span.domains > 1 else span.size
    return float(places * (1.0 - (1.0 - 1.0 / places) ** around.topk) / around.topk)


def by_name(parts: Any) -> Mapping[str, float]:
    """The parts of a pass by name."""
    return dict(zip(PARTS, (float(x) for x in parts), strict=True))
