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
from tuner.memory.composition import index_candidates
from tuner.memory.composition.index import Index
from tuner.memory.composition.measure import without_recompute
from tuner.precision import PRECISION_AWARE_FIELDS
from tuner.search.enumeration import ValidCandidates
from tuner.search.planning.memory_book import MemoryBook, layer_bytes
from tuner.search.planning.offload import Offload, combined
from tuner.search.planning.plain import PlainBlock
from tuner.search.planning.time_book import TimeBook
from tuner.search.planning.workplace import Workplace
from tuner.timing.rates import Rates
from tuner.timing.step import BREAKDOWN

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]
    Rows = NDArray[np.int64]
    Flags = NDArray[np.bool_]

_GRAPHS = (
    *("cuda_graph_impl", "cuda_graph_modules", "use_te_rng_tracker"),
    "check_for_nan_in_loss",
)
_OFFLOAD = ("cpu_offloading", "cpu_offloading_num_layers", "offload_modules")
_FRACTION, _BESIDE = "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"
OFFLOAD_FIELDS = (
    *_OFFLOAD,
    _FRACTION,
    "fine_grained_activation_offloading",
    "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
    _BESIDE,
)
EFFECTS = (*_GRAPHS, *OFFLOAD_FIELDS)
"""Fields whose effect is added to what is composed without them."""

_AWARE = "use_precision_aware_optimizer"

TIME_PARTS = BREAKDOWN
_ADDED = [BREAKDOWN.index("offload"), BREAKDOWN.index("optimizer")]


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
    """Estimates blocks of candidates of one space: `needed`, `measure`, then `estimate`.

    `added` are the fields whose effect is added to what is composed without them (`effects` of the
    whole space); without it each block decides by its own values.
    """

    def __init__(
        self,
        place: Workplace,
        *,
        workers: int | None = None,
        added: frozenset[str] | None = None,
    ) -> None:
        self.place, self._added = place, added
        architecture = place.gpu.architecture
        self.memory = MemoryBook(place.model, place.profile_source, workers)
        self.time = TimeBook(
            place.model,
            place.machine,
            seq_length=place.seq_length,
            precision=place.precision,
            workers=workers,
            **({"layers": place.layers} if place.cores else {"architecture": architecture}),
        )
        self.homes: dict[int, Candidate] = {}

    def needed(self, candidates: ValidCandidates, *, exact: bool = False) -> list[Candidate]:
        """Settings to `measure` before candidates like these can be estimated: a few from which
        all follow, or with `exact` those of the candidates themselves."""
        settings = self.settings(candidates)
        anchors = self.memory.prepare(settings)
        if exact:
            anchors = [*settings, *map(without_recompute, settings)]
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
        self.memory.measure(settings, self.time.keep)
        self.time.measure([s for s in settings if not s.fine_grained_activation_offloading])

    def sustain(self, rates: Rates) -> None:
        """Time candidates with these rates from now on."""
        self.place = replace(self.place, rates=rates)
        self.time = self.time.on(self.place.machine)

    def settings(self, candidates: ValidCandidates) -> tuple[Candidate, ...]:
        """The settings that these candidates run, offload and graphs left out."""
        return self.index(candidates).settings

    def index(self, block: ValidCandidates) -> Index:
        """The settings and pipelines of a block."""
        columns = block.columns()
        left_out = self._added
        if left_out is None:
            left_out = effects({n: block.values.get(n, (value,)) for n, value in columns.items()})
        columns = {
            name: column
            for name, column in columns.items()
            if name not in left_out and not name.startswith("env.")
        }
        return index_candidates(
            self.place.model,
            columns,
            world_size=self.place.world_size,
            global_batch_size=self.place.global_batch_size,
        )

    def estimate(self, block: ValidCandidates, *, beyond_bytes: float = 0.0) -> BlockEstimates:
        """Memory of every candidate; step time of those within `beyond_bytes` of fitting."""
        import numpy as np

        plain = PlainBlock(self, block)
        tensor = plain.tensor_sizes[plain.index.setting]
        offload = self.offload_of(block, tensor).where(plain.keeps)
        memory = plain.held(slice(None), offload)
        total = memory.sum(axis=1)
        limit = self.limits(block, plain)
        rows = np.flatnonzero(total <= limit + beyond_bytes)
        passes = plain.passes(rows)
        extra = offload.at(rows).added(passes, plain.updated[plain.pair[rows]], self.place)
        seconds = np.full(len(block), np.nan)
        spent = np.full((len(block), len(TIME_PARTS)), np.nan)
        seconds[rows] = passes.step_s + sum(extra)
        spent[rows] = with_offload(passes.spent, extra)
        return BlockEstimates(
            total, limit, seconds, memory, spent, plain.problems(), plain.exact[plain.pair]
        )

    def limits(self, block: ValidCandidates, plain: PlainBlock | None = None) -> Values:
        """Bytes that PyTorch may allocate in each candidate, `[row]`."""
        plain = plain or PlainBlock(self, block)
        return plain.limits[plain.pair]

    def offload_of(self, block: ValidCandidates, tensor: Rows) -> Offload:
        """What each row of a block moves to the host; `tensor` are its tensor-parallel sizes."""
        import numpy as np

        code, values = combined(block, _OFFLOAD, len(tensor))
        share, moved = np.zeros(len(tensor)), np.zeros(len(tensor))
        layers = self.place.model.num_layers
        for number, (by_layers, count, modules) in enumerate(values):
            rows = code == number
            if by_layers:
                # Two layers' activations stay on the device: one is used, one is on its way.
                share[rows] = max(0.0, (int(count or 0) - 2) / layers)
                moved[rows] = min(1.0, int(count or 0) / layers)
            elif modules:
                for size in np.unique(tensor[rows]):
                    some = rows & (tensor == size)
                    share[some] = moved[some] = self.share_offloaded(int(size), modules)
        code, values = combined(block, (_FRACTION, _BESIDE), len(tensor))
        fraction = np.array([float(value or 0.0) for value, _ in values])[code]
        beside = np.array([bool(value) for _, value in values])[code]
        return Offload(share, moved, fraction, beside)

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


def with_offload(spent: Values, extra: tuple[Values, Values]) -> Values:
    """What steps are spent on, `[row, part]`, with what offload adds."""
    result = spent.copy()
    for part, seconds in zip(_ADDED, extra, strict=True):
        result[:, part] += seconds
    return result


def effects(values: Mapping[str, Sequence[Any]]) -> frozenset[str]:
    """The fields whose effect is added, among fields with these values.

    A precision-aware optimizer counts as part of offload only where it comes and goes with it.
    """
    own = len(values.get(_AWARE, ())) < 2 or any(name in values for name in PRECISION_AWARE_FIELDS)
    return frozenset(EFFECTS) - ({_AWARE} if own else set())


def offloaded(setting: Candidate, modules: Sequence[str]) -> Candidate:
    """The setting with offload of these modules' inputs."""
    return replace(
        setting, fine_grained_activation_offloading=True, offload_modules=tuple(sorted(modules))
    )
