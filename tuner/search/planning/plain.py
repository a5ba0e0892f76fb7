"""Memory and step time of a block of candidates before anything is moved to the host.

What pairs of a setting and a pipeline need is composed once and spread over the rows that share
them; step times further differ by CUDA graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.memory.composition import MEMORY_PARTS, compose_index
from tuner.memory.composition.measure import without_recompute
from tuner.search.enumeration import ValidCandidates
from tuner.search.planning.graph_memory import captures_layers, layer_input_bytes
from tuner.search.planning.memory_book import layer_bytes
from tuner.search.planning.offload import Offload, Passes, combined
from tuner.search.planning.time_book import Graph
from tuner.timing.step import ALL_LAYERS, BREAKDOWN, step_times_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tuner.search.planning.estimator import SpaceEstimator

    Values = NDArray[np.float64]
    Rows = NDArray[np.int64]


_OPTIMIZER = MEMORY_PARTS.index("optimizer")


class PlainBlock:
    """A block without offload. `pair` `[row]` numbers pairs of a setting and a pipeline."""

    def __init__(self, estimator: SpaceEstimator, block: ValidCandidates) -> None:
        import numpy as np

        self._estimator, self._block, self._place = estimator, block, estimator.place
        self.index = estimator.index(block)
        pipelines = max(1, len(self.index.pipelines))
        keys = self.index.setting.astype(np.int64) * (pipelines + 1) + self.index.pipeline + 1
        _, self._example, self.pair = np.unique(keys, return_index=True, return_inverse=True)

    @cached_property
    def _composed(self) -> Any:
        pairs = self.index.at(self._example)
        profiles = self._estimator.memory.profiles(pairs)
        return compose_index(self._place.model, pairs, profiles, world_size=self._place.world_size)

    @cached_property
    def parts(self) -> Values:
        """Bytes by `MEMORY_PARTS` on the fullest stage, `[pair, part]`; NaN where unknown."""
        import numpy as np

        found = self._composed
        parts = np.stack([found.parts[name] for name in MEMORY_PARTS], axis=1).astype(np.float64)
        parts[found.problem >= 0] = np.nan
        return parts

    @cached_property
    def updated(self) -> Values:
        """Parameters whose optimizer state a rank of the fullest stage holds, `[pair]`."""
        import numpy as np

        memory = self._estimator.memory
        profiles = map(memory.profile, self.index.settings)
        each = np.array(
            [np.nan if isinstance(p, InputError) else p.state_bytes_per_parameter for p in profiles]
        )
        result: Values = self.parts[:, _OPTIMIZER] / each[self.index.setting[self._example]]
        return result

    @cached_property
    def keeps(self) -> Values:
        """1 where layers keep what they compute, and so may offload it, 0 under full
        recomputation, `[row]`."""
        import numpy as np

        full = [p.recompute is not None for p in self.index.pipelines]
        return 1.0 - np.array([*full, False], dtype=float)[self.index.pipeline]

    @cached_property
    def step_bytes(self) -> Values:
        """Bytes that the optimizer's step holds, whatever passes hold, `[pair]`."""
        result: Values = self._composed.step_bytes.astype(float)
        return result

    @cached_property
    def graph_bytes(self) -> Values:
        """Bytes that graphs of layers hold beyond `parts`, `[row]`."""
        import numpy as np

        code, graphs = self._graphs
        found = np.zeros(len(self.pair))
        rows = np.flatnonzero(np.array([captures_layers(*graph) for graph in graphs])[code])
        if not len(rows):
            return found
        settings, saved, place = self.index.settings, self._saved, self._place
        inputs = [layer_input_bytes(place.model, s, place.seq_length) for s in settings]
        share = np.where(saved > 0, np.array(inputs) / np.maximum(saved, 1.0), 0.0)
        setting = self.index.setting[self._example]
        captured = share[setting] * self.parts[:, MEMORY_PARTS.index("activations")]
        found[rows] = captured[self.pair[rows]]
        return found

    def held(self, rows: Rows | Sequence[int] | slice, moved: Offload) -> Values:
        """Bytes by `MEMORY_PARTS` of these rows where this is moved off the device, `[row, part]`.

        `moved` is that of each of the rows.
        """
        pair = self.pair[rows]
        parts = moved.remaining(self.parts[pair], self.step_bytes[pair])
        parts[:, MEMORY_PARTS.index("other")] += self.graph_bytes[rows]
        return parts

    @cached_property
    def tensor_sizes(self) -> Rows:
        """Tensor-parallel ranks of each setting."""
        import numpy as np

        return np.array([s.tensor_model_parallel_size for s in self.index.settings], dtype=np.int64)

    @cached_property
    def exact(self) -> NDArray[np.bool_]:
        """Pairs whose setting was profiled itself."""
        import numpy as np

        known = np.array([self._estimator.memory.is_exact(s) for s in self.index.settings])
        result: NDArray[np.bool_] = known[self.index.setting[self._example]]
        return result

    @cached_property
    def limits(self) -> Values:
        """Bytes that PyTorch may allocate, `[pair]`."""
        import numpy as np

        index, known = self.index, {}
        allowed = np.empty(len(self._example))
        for pair, row in enumerate(self._example.tolist()):
            setting = index.settings[int(index.setting[row])]
            number = int(index.pipeline[row])
            shape = index.pipelines[number].shape if number >= 0 else None
            grid = (
                setting.tensor_model_parallel_size,
                setting.context_parallel_size,
                setting.expert_model_parallel_size,
                setting.expert_tensor_parallel_size,
                setting.micro_batch_size,
                setting.extra,
                None if shape is None else (shape.stages, shape.chunks),
            )
            if grid not in known:
                known[grid] = self._place.allocatable_bytes(self._block.candidate(row))
            allowed[pair] = known[grid]
        return allowed

    def problems(self, weight: Rows | None = None) -> dict[str, int]:
        """Rows without an estimate by reason; each row counts `weight` times."""
        import numpy as np

        found = self._composed
        counts = np.bincount(self.pair, weights=weight, minlength=len(self._example))
        problems: Counter[str] = Counter()
        for number, count in zip(found.problem.tolist(), counts.tolist(), strict=True):
            if number >= 0:
                problems[found.problems[number]] += int(count)
        return dict(problems)

    def passes(self, rows: Rows) -> Passes:
        """Step times of these rows, and what offload is weighed against; NaN where unknown."""
        import numpy as np

        graph, graphs = self._graphs
        keys = self.pair[rows] * len(graphs) + graph[rows]
        _, example, inverse = np.unique(keys, return_index=True, return_inverse=True)
        chosen = rows[example]
        step, spent = self._composed_times(chosen, graph[chosen], graphs)
        layer, layers, microbatches = self._stage_facts(chosen)
        compute = spent[:, : BREAKDOWN.index("host") + 1].sum(axis=1)
        return Passes(step, spent, compute, layer, layers, microbatches).at(inverse)

    def least_seconds(self, rows: Rows) -> Values:
        """What the steps of these rows take at the least: without what is recomputed; 0 where
        unknown. Costs a small part of `passes`: rows share it that differ in recomputation alone.
        """
        import numpy as np

        graph, graphs = self._graphs
        number, _ = self._layouts(rows)
        keys = number * len(graphs) + graph[rows]
        _, example, inverse = np.unique(keys, return_index=True, return_inverse=True)
        chosen = rows[example]
        seconds, _ = self._composed_times(chosen, graph[chosen], graphs, recomputing=False)
        result: Values = np.nan_to_num(seconds, nan=0.0)[inverse]
        return result

    def _layouts(self, rows: Rows) -> tuple[Rows, list[Candidate]]:
        """The layout of each row, as a number among candidates that differ in theirs."""
        import numpy as np

        index, (grid, shape) = self.index, self._grids_and_shapes
        keys = grid[index.setting[rows]] * (len(shape) + 1)
        keys = keys + np.where(index.pipeline[rows] < 0, 0, shape[index.pipeline[rows]] + 1)
        _, example, number = np.unique(keys, return_index=True, return_inverse=True)
        # An example stands for rows with and without an optimizer on the host, which is added.
        return number, [
            replace(self._block.candidate(row), optimizer_cpu_offload=False)
            for row in rows[example].tolist()
        ]

    @cached_property
    def _grids_and_shapes(self) -> tuple[Rows, Rows]:
        """The layout of each setting, and that of each pipeline, as numbers of distinct ones."""
        import numpy as np

        plain: dict[Candidate, int] = {}
        grid = [plain.setdefault(without_recompute(s), len(plain)) for s in self.index.settings]
        shapes: dict[Any, int] = {}
        shape = [
            shapes.setdefault((p.split, p.shape, p.instances), len(shapes))
            for p in self.index.pipelines
        ]
        return np.array(grid, dtype=np.int64), np.array(shape, dtype=np.int64)

    def _composed_times(
        self, rows: Rows, graph: Rows, graphs: list[Graph], *, recomputing: bool = True
    ) -> tuple[Values, Values]:
        """Seconds of a step `[row]`, and of what they are made `[row, part]`; NaN where unknown.

        Those of the same rows without recomputation, unless `recomputing`.
        """
        import numpy as np

        index = self.index
        seconds = np.full(len(rows), np.nan)
        parts = np.full((len(rows), len(BREAKDOWN)), np.nan)
        own, plain, table = self._unit_times(rows, graph, graphs)
        usable = np.flatnonzero((own >= 0) & (plain >= 0) & (index.pipeline[rows] >= 0))
        if not len(usable):
            return seconds, parts
        which, candidates = self._layouts(rows[usable])
        recompute = [p.recompute if recomputing else None for p in index.pipelines]
        blocks = np.array([r[1] if r and r[0] == "block" else ALL_LAYERS for r in recompute])
        own = own if recomputing else plain
        times = step_times_of(
            candidates,
            which,
            own[usable],
            plain[usable],
            blocks[index.pipeline[rows[usable]]],
            table,
            global_batch_size=self._place.global_batch_size,
        )
        seconds[usable], parts[usable] = times.step_s, times.parts
        seconds[~np.isfinite(seconds)] = np.nan
        return seconds, parts

    def _unit_times(self, rows: Rows, graph: Rows, graphs: list[Graph]) -> tuple[Rows, Rows, Any]:
        """Rows of a table of unit times: of each row, and of the same without recomputation; -1
        where there are none."""
        import numpy as np

        book, memory = self._estimator.time, self._estimator.memory
        table = book.new_table()
        places: dict[tuple[Candidate, int], int] = {}

        def place(setting: Candidate, number: int) -> int:
            key = (setting, number)
            if key not in places:
                figures = book.figures(setting, graphs[number], memory.recipes[setting])
                places[key] = -1
                if not isinstance(figures, InputError):
                    places[key] = table.add(figures, book.units)
            return places[key]

        keys = self.index.setting[rows].astype(np.int64) * len(graphs) + graph
        distinct, inverse = np.unique(keys, return_inverse=True)
        found = []
        for setting, number in zip(*np.divmod(distinct, len(graphs)), strict=True):
            profiled = self.index.settings[int(setting)]
            found.append(
                (place(profiled, int(number)), place(without_recompute(profiled), int(number)))
            )
        both = np.array(found, dtype=np.int64).reshape(-1, 2)[inverse]
        return both[:, 0], both[:, 1], table

    def _stage_facts(self, rows: Rows) -> tuple[Values, Values, Values]:
        """Saved bytes of a layer, layers of a stage and micro-batches of a step, `[row]`."""
        import numpy as np

        place, pipelines = self._place, self.index.pipelines
        stages = np.array([p.shape.stages for p in pipelines] or [1])[self.index.pipeline[rows]]
        setting = self.index.setting[rows]
        rounds = place.global_batch_size * stages // np.maximum(1, self._sequences[setting])
        layers = place.model.num_layers / stages
        return self._saved[setting], layers, np.maximum(1, rounds).astype(float)

    @cached_property
    def _sequences(self) -> Rows:
        """Sequences of a micro-batch over all ranks of a stage, by setting."""
        import numpy as np

        world_size = self._place.world_size
        return np.array(
            [
                world_size
                // (s.tensor_model_parallel_size * s.context_parallel_size)
                * s.micro_batch_size
                for s in self.index.settings
            ]
        )

    @cached_property
    def _saved(self) -> Values:
        """Bytes that a layer keeps for one micro-batch, by setting; 0 where unknown."""
        import numpy as np

        kinds, memory = self._estimator.time.kinds, self._estimator.memory
        profiles = map(memory.profile, self.index.settings)
        return np.array(
            [0.0 if isinstance(p, InputError) else layer_bytes(p, kinds) for p in profiles]
        )

    @cached_property
    def _graphs(self) -> tuple[Rows, list[Graph]]:
        """The CUDA graphs of each row, as a number among the distinct ones."""
        names = ("cuda_graph_impl", "cuda_graph_modules")
        code, values = combined(self._block, names, len(self.pair))
        return code, [(impl or "none", tuple(modules or ())) for impl, modules in values]
