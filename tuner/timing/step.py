"""Seconds of a training step, for arrays of candidates: passes over a pipeline, then the rest.

Unit times come from a `TimeTable`. What data parallelism, the optimizer and sharding add is
computed from parameters; what of it hides behind passes, from the passes of the first and last
micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.candidate import Candidate
from tuner.memory.composition.split import SPLIT_FIELDS, Split, split_units
from tuner.memory.errors import UnsupportedError
from tuner.models import ModelSpec
from tuner.timing import collectives, offload
from tuner.timing.closed_form import pipeline_times
from tuner.timing.passes import PARTS, Machine, Surroundings, pass_seconds
from tuner.timing.pipelines import on_shared_cores, pipeline_of
from tuner.timing.rates import Rates
from tuner.timing.recurrence import PipelineTimes
from tuner.timing.schedule import Pipeline
from tuner.timing.tail import StepEnd, StepTail, finish_step
from tuner.timing.topology import span
from tuner.timing.units import MTP, ModelKernels, layer_kinds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]

BREAKDOWN = (*PARTS, "gradients", "bubble", "optimizer", "step")
"""What a step is spent on: `PARTS` of the busiest stage, exposed reduction of gradients and
gathering of weights, waiting for other stages and their transfers, the optimizer, and fixed costs
with the slowest rank's."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, `[candidate]`, and by `BREAKDOWN`, `[candidate, part]`."""

    step_s: Seconds
    parts: Seconds


class TimeTable:
    """Times and parameters of units, for each setting that candidates share."""

    def __init__(self, model: ModelSpec, machine: Machine) -> None:
        self.model, self.machine = model, machine
        self.kinds = layer_kinds(model)
        self._rows: dict[Any, int] = {}
        self.units: list[str] = []
        self._forward: list[Seconds] = []
        self._backward: list[Seconds] = []
        self._parameters: list[NDArray[np.float64]] = []
        self._whole: list[tuple[float, float, float]] = []
        self._stacked: tuple[Seconds, Seconds, Seconds, Seconds] | None = None

    def row(
        self, kernels: ModelKernels, candidate: Candidate, moved: offload.Traffic = offload.NOTHING
    ) -> int:
        """The row of a candidate with these kernels that offloads `moved`; candidates that run
        alike share it."""
        around = Surroundings.of(candidate, self.model.moe_router_topk or 0)
        grids = (
            candidate.tensor_model_parallel_size,
            candidate.context_parallel_size,
            candidate.expert_model_parallel_size,
            candidate.expert_tensor_parallel_size,
        )
        key = (id(kernels.units), around, grids, moved)
        if key not in self._rows:
            self._rows[key] = len(self._forward)
            self._measure(kernels, candidate, around, moved)
        return self._rows[key]

    def _measure(
        self,
        kernels: ModelKernels,
        candidate: Candidate,
        around: Surroundings,
        moved: offload.Traffic,
    ) -> None:
        if not self.units:
            self.units = list(kernels.units)
        units = [kernels.units[name] for name in self.units]

        def times(name: str, forward: bool) -> Seconds:
            unit = kernels.units[name]
            return pass_seconds(unit, forward, candidate, around, self.machine, moved.of(name))

        self._forward.append(np.stack([times(name, True) for name in self.units]))
        self._backward.append(np.stack([times(name, False) for name in self.units]))
        self._parameters.append(
            np.array([(unit.dense_parameters, unit.expert_parameters) for unit in units], float)
        )
        self._whole.append(
            (
                kernels.hidden_bytes,
                kernels.optimizer_bytes_per_parameter,
                kernels.step_bytes_per_parameter,
            )
        )

    def arrays(self, rows: NDArray[np.int64]) -> tuple[Seconds, Seconds, Seconds, Seconds]:
        """Forward and backward `[c, unit, part]`, parameters `[c, unit, 2]`, whole `[c, 3]`."""
        if self._stacked is None or len(self._stacked[0]) != len(self._forward):
            self._stacked = (
                np.stack(self._forward),
                np.stack(self._backward),
                np.stack(self._parameters),
                np.array(self._whole),
            )
        forward, backward, parameters, whole = self._stacked
        return forward[rows], backward[rows], parameters[rows], whole[rows]

    def counts(self, split: Split) -> Seconds:
        """How often each unit stands in each chunk of each stage, `[stage, chunk, unit]`."""
        position = {name: number for number, name in enumerate(self.units)}
        counts = np.zeros((len(split), len(split[0]), len(self.units)))
        for stage, chunks in enumerate(split):
            for chunk, names in enumerate(chunks):
                for name in names:
                    if name in position:
                        counts[stage, chunk, position[name]] += 1
        return counts


def split_of(table: TimeTable, candidate: Candidate) -> Split:
    """The units of each chunk of each stage of a candidate."""
    flat = candidate.to_flat()
    config = {name: flat.get(name) for name in SPLIT_FIELDS}
    return split_units(table.kinds, MTP in table.units, config)


def step_times(
    candidates: Sequence[Candidate],
    rows: Sequence[int],
    plain_rows: Sequence[int],
    table: TimeTable,
    *,
    global_batch_size: int,
) -> StepTimes:
    """Times of candidates; `rows` are those of the table, `plain_rows` without recompute.

    Candidates whose schedule or split Megatron-Core would refuse take infinitely long.
    """
    every = np.arange(len(candidates))
    return step_times_of(
        candidates,
        every,
        np.asarray(rows, dtype=np.int64),
        np.asarray(plain_rows, dtype=np.int64),
        np.array([_blocks(candidate) for candidate in candidates], dtype=np.int64),
        table,
        global_batch_size=global_batch_size,
    )


ALL_LAYERS = -1
"""Where recomputation is not of the first layers of each chunk only."""


def step_times_of(
    candidates: Sequence[Candidate],
    which: NDArray[np.int64],
    rows: NDArray[np.int64],
    plain_rows: NDArray[np.int64],
    blocks: NDArray[np.int64],
    table: TimeTable,
    *,
    global_batch_size: int,
) -> StepTimes:
    """`step_times` of many that share layouts, `[row]`: row `i` has the layout of
    `candidates[which[i]]`, unit times `rows[i]`, and recomputes the first `blocks[i]` layers of
    each chunk (or `ALL_LAYERS`).
    """
    numbers: dict[Any, int] = {}
    facts = [Facts.of(c, table.machine.world_size, global_batch_size) for c in candidates]
    group_of = np.full(len(candidates), -1, dtype=np.int64)
    splits: dict[Any, Split] = {}
    for index, (candidate, fact) in enumerate(zip(candidates, facts, strict=True)):
        try:
            layout = (
                candidate.pipeline_model_parallel_size,
                candidate.virtual_pipeline_model_parallel_size,
                candidate.extra,
            )
            if layout not in splits:
                splits[layout] = split_of(table, candidate)
            split = splits[layout]
            # A layout says how many chunks there are, whatever the candidate does.
            laid_out = replace(candidate, virtual_pipeline_model_parallel_size=len(split[0]))
            pipeline = pipeline_of(laid_out, fact.microbatches)
        except (ValueError, UnsupportedError):
            continue
        key = (split, pipeline, fact.reduces_beside)
        group_of[index] = numbers.setdefault(key, len(numbers))
    total = np.full(len(which), np.inf)
    parts = np.zeros((len(which), len(BREAKDOWN)))
    groups = group_of[which]
    order = np.argsort(groups, kind="stable")
    bounds = np.searchsorted(groups[order], np.arange(len(numbers) + 1))
    # The plan of a schedule is kept for the next group: equal ones come one after another.
    for (split, pipeline, _), number in sorted(numbers.items(), key=lambda i: repr(i[0][1])):
        indices = order[bounds[number] : bounds[number + 1]]
        if not len(indices):
            continue
        used, fact_of = np.unique(which[indices], return_inverse=True)
        group = _Group(
            table,
            split,
            pipeline,
            [facts[i] for i in used.tolist()],
            rows[indices],
            plain_rows[indices],
            fact_of,
        )
        total[indices], parts[indices] = group.times(blocks[indices])
    return StepTimes(total, parts)


def step_detail(
    candidate: Candidate, row: int, plain_row: int, table: TimeTable, *, global_batch_size: int
) -> tuple[Pipeline, StepDetail]:
    """What the step of one candidate is made of, as `step_times` takes it.

    Raises ValueError where Megatron-Core would refuse to run its schedule.
    """
    facts = Facts.of(candidate, table.machine.world_size, global_batch_size)
    pipeline = pipeline_of(candidate, facts.microbatches)
    rows = np.array([row]), np.array([plain_row])
    one = np.zeros(1, dtype=np.int64)
    group = _Group(table, split_of(table, candidate), pipeline, [facts], *rows, one)
    return pipeline, group.detail(np.array([_blocks(candidate)]))


def _blocks(candidate: Candidate) -> int:
    """The first layers of a chunk that are recomputed, or `ALL_LAYERS`."""
    if candidate.recompute_method != "block" or candidate.recompute_num_layers is None:
        return ALL_LAYERS
    return candidate.recompute_num_layers


@dataclass(frozen=True, slots=True)
class StepDetail:
    """What the steps of candidates that share a pipeline are made of.

    `forward` and `backward` `[candidate, stage, chunk, part]` are passes of one micro-batch,
    `transfer` `[candidate]` is one send between stages; `release` and `hidden` are those of
    `pipeline_times`.
    """

    forward: Seconds
    backward: Seconds
    transfer: Seconds
    release: Seconds | None
    hidden: Seconds | None
    times: PipelineTimes
    optimizer: Seconds
    end: StepEnd


class _Group:
    """Candidates that share a pipeline and a split of the model over it.

    `facts` are the distinct ones, `fact_of` `[candidate]` numbers each candidate's.
    """

    def __init__(
        self,
        table: TimeTable,
        split: Split,
        pipeline: Pipeline,
        facts: Sequence[Facts],
        rows: NDArray[np.int64],
        plain_rows: NDArray[np.int64],
        fact_of: NDArray[np.int64],
    ) -> None:
        self.table, self.split, self.pipeline, self.facts = table, split, pipeline, facts
        self.fact_of = fact_of
        self.machine, self.rates = table.machine, table.machine.rates
        self.rows, self.plain_rows = rows, plain_rows

    def times(self, blocks: NDArray[np.int64]) -> tuple[Seconds, Seconds]:
        """Seconds of each candidate's step, and by `BREAKDOWN`."""
        detail = self.detail(blocks)
        both, pipeline_s = detail.forward + detail.backward, detail.times.pipeline_s
        crowded = self._crowded(both.sum(axis=3), pipeline_s)
        step = (detail.end.step_s + crowded) * self.rates.imbalance + self.rates.step_s
        return step, self._breakdown(both, pipeline_s, detail.end, detail.optimizer, step)

    def detail(self, blocks: NDArray[np.int64]) -> StepDetail:
        """What the steps are made of."""
        counts = self.table.counts(self.split)
        forward_of, backward_of, parameters_of, whole = self.table.arrays(self.rows)
        forward = np.einsum("svu,cup->csvp", counts, forward_of)
        backward = np.einsum("svu,cup->csvp", counts, backward_of)
        for count in np.unique(blocks[blocks != ALL_LAYERS]).tolist():
            some = np.flatnonzero(blocks == count)
            _, plain_of, _, _ = self.table.arrays(self.plain_rows[some])
            kept = self._kept(counts, count)
            backward[some] += np.einsum("svu,cup->csvp", kept, plain_of - backward_of[some])
        held = np.einsum("svu,cuk->csvk", counts, parameters_of)
        traffic = self._traffic(held)
        self._share_weights(forward, backward, traffic)
        together, apart = forward.sum(axis=3), backward.sum(axis=3)
        transfer = self._transfer(whole[:, 0])
        release, hidden = self._release(together, traffic), self._hidden(forward, backward)
        times = pipeline_times(
            self.pipeline, together, apart, transfer, release_s=release, hidden_s=hidden
        )
        optimizer = self._optimizer(held, whole)
        end = finish_step(
            times,
            apart,
            StepTail(
                reduce_s=traffic.reduce * ~traffic.fully_sharded[:, None, None],
                gather_s=traffic.gather.sum(axis=2) * ~traffic.gathers_beside[:, None],
                optimizer_s=optimizer,
                buckets=self._buckets(held),
                overlap=self.facts[0].reduces_beside,
            ),
        )
        return StepDetail(forward, backward, transfer, release, hidden, times, optimizer, end)

    def _crowded(self, both: Seconds, pipeline_s: Seconds) -> Seconds:
        """What ranks lose that share the cores of one machine."""
        ranks = self.machine.world_size / self.pipeline.stages
        work = both.sum(axis=(1, 2)) * ranks * self.pipeline.microbatches
        crowded: Seconds = on_shared_cores(pipeline_s, work, self.machine.cores) - pipeline_s
        return crowded

    def _kept(self, counts: Seconds, blocks: int) -> Seconds:
        """Layers that are not recomputed: those of each chunk after its first `blocks`."""
        kept = np.zeros_like(counts)
        for stage, chunks in enumerate(self.split):
            for chunk, names in enumerate(chunks):
                layers = [name for name in names if name in self.table.kinds]
                for name in layers[blocks:]:
                    kept[stage, chunk, self.table.units.index(name)] += 1
        return kept

    def _traffic(self, held: Seconds) -> Traffic:
        """Reduction and gathering of the parameters `held` `[candidate, stage, chunk, 2]`."""
        links, rates, world = self.machine.links, self.rates, self.machine.world_size
        shape = held.shape[:3]
        reduce, gather = np.zeros(shape), np.zeros(shape)
        for number, fact in enumerate(self.facts):
            index = np.flatnonzero(self.fact_of == number)
            operation = "reduce_scatter" if fact.sharded else "all_reduce"
            for kind, (size, stride) in enumerate(fact.data_groups):
                way = span(size, stride, links, world)
                counts = held[index, :, :, kind]
                reduce[index] += collectives.seconds(
                    operation, counts * fact.gradient_bytes, way, links, rates
                )
                if fact.sharded:
                    gather[index] += collectives.seconds(
                        "all_gather", counts * fact.weight_bytes, way, links, rates
                    )
        return Traffic(
            reduce,
            gather,
            np.array([fact.gathers_beside for fact in self.facts])[self.fact_of],
            np.array([fact.fully_sharded for fact in self.facts])[self.fact_of],
        )

    def _share_weights(self, forward: Seconds, backward: Seconds, traffic: Traffic) -> None:
        """Fully sharded weights are gathered for each pass, and gradients reduced after each."""
        full = traffic.fully_sharded
        if not full.any():
            return
        part = PARTS.index("data")
        gather, both = traffic.gather[full], (traffic.gather + traffic.reduce)[full]
        forward[full, :, :, part] += _left(gather, forward[full].sum(axis=3), self.rates)
        backward[full, :, :, part] += _left(both, backward[full].sum(axis=3), self.rates)

    def _transfer(self, hidden_bytes: Seconds) -> Seconds:
        """Seconds of one send between stages, `[candidate]`."""
        stages, world = self.pipeline.stages, self.machine.world_size
        if stages == 1:
            return np.zeros(len(hidden_bytes))
        way = span(stages, max(1, world // stages), self.machine.links, world)
        return collectives.seconds("send", hidden_bytes, way, self.machine.links, self.rates)

    def _release(self, forward: Seconds, traffic: Traffic) -> Seconds | None:
        """When weights gathered beside the first forward passes let each chunk run."""
        beside = traffic.gathers_beside & ~traffic.fully_sharded
        if not beside.any():
            return None
        gathered = np.cumsum(traffic.gather, axis=2) * beside[:, None, None]
        release: Seconds = np.maximum(0.0, gathered - forward * self.rates.data_hidden)
        return release

    def _hidden(self, forward: Seconds, backward: Seconds) -> Seconds | None:
        """What combined passes save: communication of experts beside the other pass's kernels.

        No more can hide than there are kernels.
        """
        if not self.pipeline.combined:
            return None
        part = PARTS.index("expert")
        both = forward + backward
        exchanged = both[..., part]
        kernels = both.sum(axis=3) - exchanged
        hidden: Seconds = np.minimum(exchanged, kernels) * self.rates.expert_hidden
        return hidden

    def _optimizer(self, held: Seconds, whole: Seconds) -> Seconds:
        """Seconds of the optimizer and of zeroing and measuring gradients, `[candidate, stage]`."""
        bandwidth = self.machine.gpu.memory_bandwidth_bytes_per_s * self.rates.memory
        shards = np.array([fact.shards for fact in self.facts], float)[self.fact_of]
        per_stage = held.sum(axis=2)
        updated = (per_stage / shards[:, None, :]).sum(axis=2)
        away = np.array([fact.on_host for fact in self.facts])[self.fact_of, None]
        moved = updated * (1 - away) * whole[:, 1, None] + per_stage.sum(axis=2) * whole[:, 2, None]
        seconds: Seconds = moved / bandwidth
        if away.any():
            host = [self._host_update(fact.overlaps_host) for fact in self.facts]
            seconds += updated * away * np.array(host)[self.fact_of, None]
        return seconds

    def _host_update(self, overlapped: bool) -> float:
        return offload.host_update_s(self.machine.gpu, self.rates, overlapped=overlapped)

    def _buckets(self, held: Seconds) -> NDArray[np.int64]:
        """Gradient buckets of each chunk (distributed_data_parallel_config.py `bucket_size`)."""
        sizes = np.array([fact.bucket_parameters for fact in self.facts])[self.fact_of]
        counts = np.ceil(held.sum(axis=3) / sizes[:, None, None])
        return np.maximum(1, counts).astype(np.int64)

    def _breakdown(
        self, both: Seconds, pipeline_s: Seconds, end: Any, optimizer: Seconds, step: Seconds
    ) -> Seconds:
        """Parts of each step: passes of the busiest stage, and what is not passes."""
        count = self.pipeline.microbatches
        work = both.sum(axis=(2, 3))
        chosen = np.arange(len(work)), work.argmax(axis=1)
        busy = count * both.sum(axis=2)[chosen]
        waits = pipeline_s - busy.sum(axis=1)
        busy[:, PARTS.index("expert")] += np.minimum(0.0, waits)  # hidden by combined passes
        waits = np.maximum(0.0, waits)
        longest = optimizer.max(axis=1)
        left = end.step_s - pipeline_s - longest
        rest = step - end.step_s
        return np.concatenate([busy, np.stack([left, waits, longest, rest], axis=1)], axis=1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Communication of gradients and weights, `[candidate, stage, chunk]`, and when it runs."""

    reduce: Seconds
    gather: Seconds
    gathers_beside: NDArray[np.bool_]
    fully_sharded: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a candidate the parts of a step outside of passes depend on.

    `data_groups` are (ranks, stride) of the groups that share dense and expert parameters;
    `on_host` is the share of the optimizer's state that lies there.
    """

    microbatches: int
    data_groups: tuple[tuple[int, int], tuple[int, int]]
    shards: tuple[int, int]
    sharded: bool
    gradient_bytes: float
    weight_bytes: float
    bucket_parameters: float
    reduces_beside: bool
    gathers_beside: bool
    fully_sharded: bool
    on_host: float = 0.0
    overlaps_host: bool = False

    @classmethod
    def of(cls, candidate: Candidate, world_size: int, global_batch_size: int) -> Facts:
        extra = dict(candidate.extra)
        tensor = candidate.tensor_model_parallel_size
        expert_tensor = candidate.expert_tensor_parallel_size or tensor
        experts = expert_tensor * candidate.expert_model_parallel_size
        per_stage = max(1, world_size // candidate.pipeline_model_parallel_size)
        replicas, expert_replicas = max(1, per_stage // tensor), max(1, per_stage // experts)
        data = max(1, replicas // candidate.context_parallel_size)
        full = bool(extra.get("use_megatron_fsdp"))
        sharded = candidate.use_distributed_optimizer or full
        strategy = extra.get("data_parallel_sharding_strategy")
        return cls(
            microbatches=max(1, global_batch_size // (data * candidate.micro_batch_size)),
            data_groups=((replicas, tensor), (expert_replicas, experts)),
            shards=(replicas, expert_replicas) if sharded else (1, 1),
            sharded=sharded,
            gradient_bytes=4.0 if extra.get("grad_reduce_in_fp32", True) else 2.0,
            weight_bytes=_weight_bytes(extra),
            bucket_parameters=float(extra.get("bucket_size") or max(40e6, 1e6 * replicas)),
            reduces_beside=bool(extra.get("overlap_grad_reduce")),
            gathers_beside=bool(extra.get("overlap_param_gather")),
            fully_sharded=full and strategy in (None, "optim_grads_params"),
            on_host=_on_host(candidate),
            overlaps_host=bool(extra.get("overlap_cpu_optimizer_d2h_h2d")),
        )


def _on_host(candidate: Candidate) -> float:
    """The share of the optimizer's state on the host; 0 for what is no number."""
    share = candidate.optimizer_offload_fraction if candidate.optimizer_cpu_offload else 0.0
    return min(1.0, max(0.0, share))


def _left(seconds: Seconds, window_s: Seconds, rates: Rates) -> Seconds:
    """What of `seconds` of communication is exposed where passes of `window_s` run beside it."""
    hidden = np.minimum(seconds, window_s * rates.data_hidden)
    exposed: Seconds = seconds - hidden + rates.contention * hidden
    return exposed


def _weight_bytes(extra: Mapping[str, Any]) -> float:
    """Bytes of a gathered weight; those held in FP8 with scales of their own are gathered so."""
    in_low = bool(extra.get("fp8_param_gather") or extra.get("fp8_param")) and extra.get("fp8")
    return 1.0 if in_low and extra.get("fp8_recipe", "delayed") != "mxfp8" else 2.0
