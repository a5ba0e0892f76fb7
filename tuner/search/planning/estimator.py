"""Memory and step time of every candidate of a space, from a few profiles.

Candidates that differ only in what neither model reads (environment variables) share their
figures, and what offload and CUDA graphs change is added to what is composed without them; so a
space of millions takes the composition of some thousands of settings and pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.constraints.view import UNSET
from tuner.errors import InputError
from tuner.memory.composition import ProfileSource, compose_index, index_candidates
from tuner.memory.composition.index import Index
from tuner.memory.composition.measure import without_recompute
from tuner.search.enumeration import ValidCandidates
from tuner.search.planning.memory_book import MemoryBook, layer_bytes
from tuner.search.planning.offload import Offload
from tuner.search.planning.time_book import Graph, TimeBook
from tuner.search.planning.workplace import Workplace
from tuner.timing.step import BREAKDOWN, step_times

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]
    Rows = NDArray[np.int64]
    Flags = NDArray[np.bool_]

_GRAPHS = ("cuda_graph_impl", "cuda_graph_modules")
_OFFLOAD = ("cpu_offloading", "cpu_offloading_num_layers", "offload_modules")
_FRACTION = "optimizer_offload_fraction"
EFFECTS = (
    *_GRAPHS,
    *_OFFLOAD,
    _FRACTION,
    "fine_grained_activation_offloading",
    "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_te_rng_tracker",
)
"""Fields whose effect is added to what is composed without them."""

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "other")
TIME_PARTS = (*BREAKDOWN, "offload")


@dataclass(frozen=True, slots=True)
class BlockEstimates:
    """Estimates of a block of candidates, arrays `[row]`.

    `memory_bytes` is what PyTorch allocates on the fullest rank, `limit_bytes` what it may; NaN
    where there is no estimate, with the reasons counted in `problems`. `step_time_s` may be NaN
    where memory does not fit, too. The parts are arrays `[row, part]` in the order of
    `MEMORY_PARTS` and `TIME_PARTS`. `exact` marks rows whose own setting was profiled.
    """

    memory_bytes: Values
    limit_bytes: Values
    step_time_s: Values
    memory_parts: Values
    time_parts: Values
    problems: Mapping[str, int]
    exact: Flags

    @property
    def fits(self) -> Flags:
        result: Flags = self.memory_bytes <= self.limit_bytes
        return result

    def with_less_memory(self, bytes_less: float) -> BlockEstimates:
        """The same where this much must stay free."""
        return replace(self, limit_bytes=self.limit_bytes - bytes_less) if bytes_less else self


class SpaceEstimator:
    """Estimates blocks of candidates of one space: `needed`, `measure`, then `estimate`."""

    def __init__(self, place: Workplace, *, workers: int | None = None) -> None:
        self.place = place
        architecture = place.gpu.architecture
        source = ProfileSource(place.seq_length, place.precision, architecture, layers=place.layers)
        self.memory = MemoryBook(place.model, source, workers)
        self.time = TimeBook(
            place.model,
            place.machine,
            seq_length=place.seq_length,
            precision=place.precision,
            workers=workers,
            **({"layers": place.layers} if place.cores else {"architecture": architecture}),
        )
        self.homes: dict[int, Candidate] = {}

    def needed(self, candidates: ValidCandidates) -> list[Candidate]:
        """Settings to `measure` before candidates like these can be estimated."""
        anchors = self.memory.prepare(self.settings(candidates))
        for recipe in self.memory.recipes.values():
            self.homes.setdefault(recipe.unchanged.tensor_model_parallel_size, recipe.unchanged)
        offloading = [
            offloaded(home, modules)
            for home in self.homes.values()
            for modules in candidates.values.get("offload_modules", ())
            if modules is not UNSET
        ]
        return list(dict.fromkeys([*anchors, *self.homes.values(), *offloading]))

    def measure(self, settings: Sequence[Candidate]) -> None:
        """Profile these settings: their memory and their kernels."""
        self.memory.measure(settings)
        self.time.measure([s for s in settings if not s.fine_grained_activation_offloading])

    def settings(self, candidates: ValidCandidates) -> tuple[Candidate, ...]:
        """The settings that these candidates run, offload and graphs left out."""
        return self.index(candidates).settings

    def index(self, block: ValidCandidates) -> Index:
        """The settings and pipelines of a block."""
        columns = {
            name: column
            for name, column in block.columns().items()
            if name not in EFFECTS and not name.startswith("env.")
        }
        return index_candidates(
            self.place.model,
            columns,
            world_size=self.place.world_size,
            global_batch_size=self.place.global_batch_size,
        )

    def estimate(self, block: ValidCandidates, *, beyond_bytes: float = 0.0) -> BlockEstimates:
        """Memory of every candidate; step time of those within `beyond_bytes` of fitting."""
        return _Block(self, block).estimates(beyond_bytes)

    def limits(self, block: ValidCandidates) -> Values:
        """Bytes that PyTorch may allocate in each candidate, `[row]`."""
        return _Block(self, block).limits()

    def share_offloaded(self, tensor: int, modules: Any) -> float:
        """The share of a layer's saved bytes that offload of these modules takes off the device.

        NaN where it cannot be profiled.
        """
        home = self.homes.get(tensor)
        if home is None:
            return float("nan")
        plain, lean = (self.memory.profile(s) for s in (home, offloaded(home, modules)))
        if isinstance(plain, InputError) or isinstance(lean, InputError):
            return float("nan")
        kinds = self.time.kinds
        return max(0.0, 1.0 - layer_bytes(lean, kinds) / layer_bytes(plain, kinds))


def offloaded(setting: Candidate, modules: Sequence[str]) -> Candidate:
    """The setting with offload of these modules' inputs."""
    return replace(
        setting, fine_grained_activation_offloading=True, offload_modules=tuple(sorted(modules))
    )


class _Block:
    """One block: what pairs of setting and pipeline need, spread over rows and their extras."""

    def __init__(self, estimator: SpaceEstimator, block: ValidCandidates) -> None:
        import numpy as np

        self._estimator, self._block, self._place = estimator, block, estimator.place
        self._index = estimator.index(block)
        rows = len(block)
        pipelines = max(1, len(self._index.pipelines))
        keys = self._index.setting.astype(np.int64) * (pipelines + 1) + self._index.pipeline + 1
        _, self._example, self._pair = np.unique(keys, return_index=True, return_inverse=True)
        self._rows = rows

    def limits(self) -> Values:
        """Bytes that PyTorch may allocate, `[row]`."""
        return self._limits()[self._pair]

    def estimates(self, beyond_bytes: float) -> BlockEstimates:
        import numpy as np

        pairs = self._pair_index()
        profiles = self._estimator.memory.profiles(pairs)
        found = compose_index(self._place.model, pairs, profiles, world_size=self._place.world_size)
        known = found.problem < 0
        parts = np.stack([found.parts[name] for name in MEMORY_PARTS], axis=1).astype(np.float64)
        parts[~known] = np.nan
        offload = self._offload()
        memory = parts[self._pair]
        memory[:, 2] = offload.optimizer(memory[:, 2])
        memory[:, 3] = offload.activations(memory[:, 3])
        total = memory.sum(axis=1)
        limit = self.limits()
        timed = total <= limit + beyond_bytes
        seconds, spent = self._times(np.flatnonzero(timed), parts, offload)
        exact = np.array([self._estimator.memory.is_exact(s) for s in pairs.settings])
        counts = np.bincount(self._pair, minlength=len(self._example))
        problems: dict[str, int] = {}
        for number, count in zip(found.problem, counts, strict=True):
            if number >= 0:
                reason = found.problems[number]
                problems[reason] = problems.get(reason, 0) + int(count)
        return BlockEstimates(
            total,
            limit,
            seconds,
            memory,
            spent,
            problems,
            exact[pairs.setting][self._pair],
        )

    def _pair_index(self) -> Index:
        """The index with one row for each pair of setting and pipeline."""
        return self._index.at(self._example)

    def _limits(self) -> Values:
        """Bytes that PyTorch may allocate, `[pair]`."""
        import numpy as np

        allowed = [
            self._place.allocatable_bytes(self._block.candidate(int(row))) for row in self._example
        ]
        return np.array(allowed, dtype=np.float64)

    def _times(self, rows: Rows, parts: Values, offload: Offload) -> tuple[Values, Values]:
        """Seconds of a step and by part of these rows; NaN for the others."""
        import numpy as np

        seconds = np.full(self._rows, np.nan)
        spent = np.full((self._rows, len(TIME_PARTS)), np.nan)
        if not len(rows):
            return seconds, spent
        graph, graphs = self._graphs()
        keys = self._pair[rows] * len(graphs) + graph[rows]
        _, example, inverse = np.unique(keys, return_index=True, return_inverse=True)
        chosen = rows[example]
        settings = self._index.setting[chosen].astype(np.int64)
        candidates = [self._block.candidate(int(row)) for row in chosen]
        step, by_part = self._composed_times(
            candidates, settings, [graphs[g] for g in graph[chosen]]
        )
        facts = self._stage_facts(candidates, settings)
        compute = by_part[:, : BREAKDOWN.index("host") + 1].sum(axis=1)
        own = Offload(offload.share[rows], offload.fraction[rows])
        extra = own.seconds(
            layer_bytes=facts[inverse, 0],
            layers=facts[inverse, 1],
            microbatches=facts[inverse, 2],
            compute_s=compute[inverse],
            state_bytes=parts[self._pair[rows], 2],
            host_bytes_per_s=self._place.host_bytes_per_s,
            contention=self._place.rates.contention,
        )
        seconds[rows] = step[inverse] + extra
        spent[rows, :-1] = by_part[inverse]
        spent[rows, -1] = extra
        return seconds, spent

    def _composed_times(
        self, candidates: Sequence[Candidate], settings: Rows, graphs: Sequence[Graph]
    ) -> tuple[Values, Values]:
        import numpy as np

        book, memory = self._estimator.time, self._estimator.memory
        table = book.new_table()
        numbers: list[int] = settings.tolist()
        places: dict[tuple[Candidate, Graph], int] = {}

        def row(setting: Candidate, graph: Graph) -> int:
            key = (setting, graph)
            if key not in places:
                figures = book.figures(setting, graph, memory.recipes[setting])
                places[key] = -1
                if not isinstance(figures, InputError):
                    places[key] = table.add(figures, book.units)
            return places[key]

        own, plain = [], []
        for number, graph in zip(numbers, graphs, strict=True):
            setting = self._index.settings[number]
            own.append(row(setting, graph))
            plain.append(row(without_recompute(setting), graph))
        usable = np.array([a >= 0 and b >= 0 for a, b in zip(own, plain, strict=True)])
        seconds = np.full(len(candidates), np.nan)
        parts = np.full((len(candidates), len(BREAKDOWN)), np.nan)
        chosen = np.flatnonzero(usable)
        if len(chosen):
            times = step_times(
                [candidates[i] for i in chosen.tolist()],
                [own[i] for i in chosen],
                [plain[i] for i in chosen],
                table,
                global_batch_size=self._place.global_batch_size,
            )
            seconds[chosen], parts[chosen] = times.step_s, times.parts
        seconds[~np.isfinite(seconds)] = np.nan
        return seconds, parts

    def _stage_facts(self, candidates: Sequence[Candidate], settings: Rows) -> Values:
        """Saved bytes of a layer, layers of a stage and micro-batches of a step, `[row, 3]`."""
        import numpy as np

        place, kinds = self._place, self._estimator.time.kinds
        facts = []
        for candidate, number in zip(candidates, settings, strict=True):
            profile = self._estimator.memory.profile(self._index.settings[int(number)])
            saved = 0.0 if isinstance(profile, InputError) else layer_bytes(profile, kinds)
            replicas = max(1, place.world_size // candidate.model_parallel_size())
            facts.append(
                (
                    saved,
                    place.model.num_layers / candidate.pipeline_model_parallel_size,
                    max(1, place.global_batch_size // (replicas * candidate.micro_batch_size)),
                )
            )
        return np.array(facts, dtype=np.float64)

    def _graphs(self) -> tuple[Rows, list[Graph]]:
        """The CUDA graphs of each row, as a number among the distinct ones."""
        code, values = self._combined(_GRAPHS)
        return code, [
            (_value(impl, "none"), tuple(_value(modules, ()))) for impl, modules in values
        ]

    def _offload(self) -> Offload:
        """The shares that each row moves to the host."""
        import numpy as np

        code, values = self._combined(_OFFLOAD)
        sizes = np.array([s.tensor_model_parallel_size for s in self._index.settings])
        tensor = sizes[self._index.setting]
        share = np.zeros(self._rows)
        layers = self._place.model.num_layers
        for number, (by_layers, count, modules) in enumerate(values):
            rows = code == number
            if _value(by_layers, False):
                # Two layers' activations stay on the device: one is used, one is on its way.
                share[rows] = max(0.0, (int(_value(count, 0)) - 2) / layers)
            elif _value(modules, ()):
                for size in np.unique(tensor[rows]):
                    here = rows & (tensor == size)
                    share[here] = self._estimator.share_offloaded(int(size), modules)
        code, values = self._combined((_FRACTION,))
        fraction = np.array([float(_value(value, 0.0)) for (value,) in values])[code]
        return Offload(share, fraction)

    def _combined(self, names: Sequence[str]) -> tuple[Rows, list[tuple[Any, ...]]]:
        """The combination of these fields in each row, and the distinct combinations."""
        import numpy as np

        block = self._block
        code = np.zeros(self._rows, dtype=np.int64)
        offered: list[tuple[Any, ...]] = [()]
        for name in names:
            values = list(block.values.get(name, [block.fixed.get(name, UNSET)]))
            own = block.codes.get(name)
            code = code * len(values) + (0 if own is None else own)
            offered = [(*combination, value) for combination in offered for value in values]
        used, number = np.unique(code, return_inverse=True)
        return number.astype(np.int64), [offered[place] for place in used]


def _value(value: Any, default: Any) -> Any:
    return default if value is UNSET or value is None else value
