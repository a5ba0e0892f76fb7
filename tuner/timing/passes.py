"""Seconds of one forward or backward pass of a unit, and what they are spent on.

The device runs kernels one after another, each after a small gap. A collective that the next
operation waits for adds its time; one that runs beside the following product adds what is left
when that product has ended. The host launches kernels ahead of the device; where it is slower than
the device, its time is the pass's. CUDA graphs take the kernels of their scopes off the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tuner.candidate import Candidate
from tuner.hardware import Gpu
from tuner.memory.kernel_log import GROUPS, KIND, OPERATIONS, KernelLog
from tuner.timing import collectives
from tuner.timing.kernels import Same, device_seconds
from tuner.timing.offload import transfer_wait
from tuner.timing.rates import Rates
from tuner.timing.topology import Links, Span, group_span
from tuner.timing.units import SCOPES, UnitKernels

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Seconds = NDArray[np.float64]

PARTS = ("compute", "recompute", "tensor", "context", "expert", "data", "offload", "host")
"""What the seconds of a pass are spent on: kernels, kernels and collectives of recompute, exposed
communication of tensor, context, expert and (with fully sharded weights) data parallelism, exposed
transfers of activations to and from the host, and waiting for the host to launch."""

_PART_OF_GROUP = {"cp": "context", "ep": "expert", "tp-ep": "expert", "etp": "expert"}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What of a candidate changes the time of a pass besides its kernels.

    `graphed` are the captured parts of a layer (`SCOPES`), `whole` says that the host launches
    nothing (full-iteration graphs). `dispatcher` is "alltoall", "deepep" or "hybridep".
    `fused_experts` says that activation and quantisation are part of the experts' products.
    `combined`: passes of two micro-batches run node by node beside each other. `balanced`: every
    expert is forced to get equally many tokens.
    """

    graphed: frozenset[str]
    whole: bool
    userbuffers: bool
    dispatcher: str
    topk: int
    fused_experts: bool
    combined: bool = False
    balanced: bool = True

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
            combined=bool(extra.get("overlap_moe_expert_parallel_comm")),
            balanced=topk < 1 or bool(extra.get("moe_router_force_load_balancing")),
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
    moved_bytes: float = 0.0,
) -> Seconds:
    """Seconds of one pass by part, `[PARTS]`; it moves `moved_bytes` of activations to the host or
    back."""
    log = unit.forward if forward else unit.backward
    plan, rates = _plan(Same(unit), forward, around), machine.rates
    gaps = plan.graphed * rates.graph_gap_s + (plan.launched - plan.graphed) * rates.kernel_gap_s
    kept = plan.kept if around.balanced else np.where(plan.routed, rates.routing, 1.0) * plan.kept
    device = device_seconds(log, machine.gpu, rates) * kept + gaps
    parts = dict.fromkeys(PARTS, 0.0)
    parts["recompute"] = float(device[plan.repeated].sum())
    parts["compute"] = float(device.sum()) - parts["recompute"]
    for exchange in plan.exchanges:
        seconds = _exposed(exchange, device, candidate, around, machine)
        parts["recompute" if exchange.repeated else exchange.part] += seconds
    if moved_bytes:
        parts["offload"] = float(
            transfer_wait(moved_bytes, sum(parts.values()), machine.gpu, rates)
        )
    host = (
        plan.launches * rates.host_kernel_s
        + plan.experts * rates.host_expert_s
        + plan.graphs * rates.graph_launch_s
        + plan.nodes * rates.host_node_s
    )
    parts["host"] = float(host_wait(host, sum(parts.values())))
    return np.array([parts[name] for name in PARTS])


def host_wait(host_s: ArrayLike, device_s: ArrayLike) -> Seconds:
    """What passes take longer than their device work because the host launches them.

    The slower of the two decides, softly: within a pass the host is ahead of long kernels and
    behind short ones.
    """
    host, device = np.asarray(host_s, float), np.asarray(device_s, float)
    both: Seconds = (host**_SHARPNESS + np.maximum(device, 0.0) ** _SHARPNESS) ** (1 / _SHARPNESS)
    return both - np.maximum(device, 0.0)


def host_work(wait_s: ArrayLike, device_s: ArrayLike) -> Seconds:
    """The host's time in passes that wait this long for it: `host_wait` undone."""
    wait, device = np.asarray(wait_s, float), np.maximum(np.asarray(device_s, float), 0.0)
    powers = (device + wait) ** _SHARPNESS - device**_SHARPNESS
    work: Seconds = np.maximum(powers, 0.0) ** (1 / _SHARPNESS)
    return work


_SHARPNESS = 4.0
"""Exponent of the norm that stands for the larger of host and device time."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One collective of a pass.

    `cover` is the row of the operation that runs beside it, or -1 where it is waited for; `partner`
    that of the product whose operand or result it moves, or -1.
    """

    group: str
    size: int
    operation: str
    bytes: float
    part: str
    cover: int
    partner: int
    repeated: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """What of a pass does not depend on how fast anything is.

    By operation: `kept` is the share of its work that is done, `launched` 1 where the device runs
    something, `graphed` the share of it that graphs launch; `repeated` is recompute, `routed` work
    on tokens that a router sends. `launches` and `experts` count host work: launches, and experts
    of grouped products; `graphs` CUDA graphs, `nodes` those of combined passes.
    """

    kept: Seconds
    launched: Seconds
    graphed: Seconds
    repeated: NDArray[np.bool_]
    routed: NDArray[np.bool_]
    exchanges: tuple[_Exchange, ...]
    launches: float
    experts: float
    graphs: int
    nodes: int


@lru_cache(maxsize=16384)
def _plan(key: Same, forward: bool, around: Surroundings) -> _Plan:
    unit: UnitKernels = key.item
    log = unit.forward if forward else unit.backward
    repeated = np.zeros(len(log), dtype=bool) if forward else unit.recomputed
    kept = _kept(log, around)
    away = [KIND["collective"], KIND["host_memory"], KIND["synchronize"]]
    launched = (~np.isin(log.kind, away) & (kept > 0)).astype(np.float64)
    graphed = _graphed_share(unit, forward, around)
    eager = 1.0 - graphed
    experts = np.where(log.kind == KIND["grouped_gemm"], log.batch, 0)
    exchanges = tuple(_exchanges(log, repeated))
    launches = _launches(log)
    for exchange in exchanges:
        if _in_ring(exchange, around):
            launches[exchange.partner] += _RING_LAUNCH * exchange.size
    return _Plan(
        kept=kept,
        launched=launched,
        graphed=graphed * launched,
        repeated=repeated,
        routed=np.isin(log.kind, [KIND["grouped_gemm"], KIND["permute"]]),
        exchanges=exchanges,
        launches=float((launches * eager).sum()),
        experts=float((experts * eager).sum()),
        graphs=len(around.graphed) if graphed.any() and not around.whole else 0,
        nodes=_nodes(exchanges) if around.combined and not around.whole else 0,
    )


def _nodes(exchanges: Sequence[_Exchange]) -> int:
    """Parts that a combined pass runs a unit in, each with a graph of its own for autograd.

    megatron/core/models/common/model_chunk_schedule_plan.py, TransformerLayerSchedulePlan: layers
    of experts have attention, what follows it, dispatch, experts and combination.
    """
    return 5 if any(exchange.part == "expert" for exchange in exchanges) else 2


def _in_ring(exchange: _Exchange, around: Surroundings) -> bool:
    """Whether userbuffers pass an exchange on step by step, beside a product cut into as many.

    Transformer Engine, transformer_engine/common/comm_gemm_overlap, CommOverlapP2PBase.
    """
    return around.userbuffers and exchange.part == "tensor" and exchange.partner >= 0


def _graphed_share(unit: UnitKernels, forward: bool, around: Surroundings) -> Seconds:
    """Share of each operation that graphs launch.

    Backward operations are not filed by module: they take the share of the forward pass.
    """
    log = unit.forward if forward else unit.backward
    if around.whole:
        return np.ones(len(log))
    captured = np.array([name in around.graphed for name in SCOPES])
    share: Seconds = captured[unit.scope].astype(np.float64)
    if forward:
        return share
    launches = _launches(unit.forward)
    mean = float((share * launches).sum() / max(launches.sum(), 1e-9))
    return np.full(len(log), mean)


_LAUNCH_WEIGHT = {
    # host work in units of one plain kernel launch: layers of Transformer Engine do more in Python
    "gemm": 3.0,
    "grouped_gemm": 3.0,
    "attention_forward": 4.0,
    "attention_backward": 4.0,
    "quantize": 1.5,
    "permute": 3.0,
    "collective": 2.0,
    "host_copy": 4.0,
    "synchronize": 4.0,
    "host_memory": 0.0,
}


def _launches(log: KernelLog) -> Seconds:
    """Host work of each operation, in kernel launches."""
    weights = np.ones(len(log))
    for kind, weight in _LAUNCH_WEIGHT.items():
        weights[log.kind == KIND[kind]] = weight
    return weights


def _kept(log: KernelLog, around: Surroundings) -> Seconds:
    """Share of each operation that is left where others do its work.

    Flexible dispatchers move rows into place while they exchange them: DeepEP leaves one of the
    two permutations on each side, HybridEP none (megatron/core/transformer/moe/fused_a2a.py).
    Transformer Engine's grouped MLP (pytorch/ops/fused), with gates and values interleaved, is one
    operation for both layers of the experts and what lies between them.
    """
    kept = np.ones(len(log))
    left = {"alltoall": 1.0, "deepep": 0.5}.get(around.dispatcher, 0.0)
    kept[log.kind == KIND["permute"]] = left
    products = np.flatnonzero(log.kind == KIND["grouped_gemm"])
    if around.fused_experts and len(products):
        between = np.zeros(len(log), dtype=bool)
        between[products[0] : products[-1]] = True
        kept[between & np.isin(log.kind, [KIND["memory"], KIND["quantize"]])] = 0.0
    return kept


def _exchanges(log: KernelLog, repeated: NDArray[np.bool_]) -> Iterator[_Exchange]:
    large = np.flatnonzero(np.isin(log.kind, _LARGE))
    for row in np.flatnonzero(log.kind == KIND["collective"]).tolist():
        name = GROUPS[log.group[row]]
        before, after = large[large < row], large[large > row]
        beside = bool(log.asynchronous[row]) and len(after)
        result = not beside and OPERATIONS[log.op[row]] != "all_gather"
        near = before[-1:] if result else after[:1]
        yield _Exchange(
            group=name,
            size=int(log.group_size[row]),
            operation=OPERATIONS[log.op[row]],
            bytes=float(log.bytes[row]),
            part=_PART_OF_GROUP.get(name, "tensor"),
            cover=int(after[0]) if beside else -1,
            partner=int(near[0]) if len(near) else -1,
            repeated=bool(repeated[row]),
        )


_LARGE = [KIND[k] for k in ("gemm", "grouped_gemm", "attention_forward", "attention_backward")]


def _exposed(
    exchange: _Exchange,
    device: Seconds,
    candidate: Candidate,
    around: Surroundings,
    machine: Machine,
) -> float:
    """Seconds the device waits for a collective."""
    rates, links = machine.rates, machine.links
    span = group_span(exchange.group, exchange.size, candidate, links, machine.world_size)
    size = exchange.bytes
    if exchange.operation == "all_to_all" and exchange.part == "expert":
        size *= _once_per_rank(span, around)
    if exchange.part == "expert" and not around.balanced:
        size *= rates.routing
    seconds = float(collectives.seconds(exchange.operation, size, span, links, rates))
    if _in_ring(exchange, around):
        seconds += (span.size - 2) * _RING_STEP * rates.link_latency_s
        hidden = min(seconds * rates.userbuffers_hidden, float(device[exchange.partner]))
    elif exchange.cover >= 0:
        hidden = min(seconds, float(device[exchange.cover]))
    else:
        return seconds
    return seconds - hidden + rates.contention * hidden


_RING_LAUNCH = 0.25
"""Host work of a ring's step against a launch from Python: a product, two transfers and an event,
some 2 us each, in one call into C++ (CommOverlapP2PBase `split_overlap_ag`, `split_overlap_rs`),
where a layer's launch takes some 30 us (`host_kernel_s` as fitted on H100)."""

_RING_STEP = 0.5
"""Share of a collective's fixed time that each further step of a ring of userbuffers takes."""


def _once_per_rank(span: Span, around: Surroundings) -> float:
    """Share of the rows that are sent where each token goes to a rank only once.

    Of `topk` experts drawn evenly from n ranks, n (1 - (1 - 1/n)^topk) lie on different ones.
    Between domains flexible dispatchers send a token once for each domain.
    """
    if around.dispatcher == "alltoall" or around.topk < 1:
        return 1.0
    places = span.domains if span.domains > 1 else span.size
    return float(places * (1.0 - (1.0 - 1.0 / places) ** around.topk) / around.topk)
