"""Seconds of the units of a model under every setting of a space, from those of its anchors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.memory.request import DryRunRequest
from tuner.memory.trace import Trace
from tuner.models import ModelSpec
from tuner.search.planning.anchors import Recipe
from tuner.timing.batches import with_batch
from tuner.timing.passes import PARTS, Machine, host_wait, host_work
from tuner.timing.profile_runs import keep_kernels
from tuner.timing.step import TimeTable
from tuner.timing.units import ModelKernels, kernel_request, model_kernels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

Graph = tuple[str, tuple[str, ...]]
"""CUDA graphs of a candidate: implementation and modules."""


@dataclass(frozen=True, slots=True)
class UnitFigures:
    """Seconds of forward and backward passes `[unit, part]`, parameters `[unit, 2]`, and what a
    `TimeTable` keeps of a whole model."""

    forward: Values
    backward: Values
    parameters: Values
    whole: Values


class DerivedTimes(TimeTable):
    """A `TimeTable` that takes rows which were not measured."""

    def add(self, figures: UnitFigures, units: list[str]) -> int:
        """The number of a new row."""
        self.units = units
        self._forward.append(figures.forward)
        self._backward.append(figures.backward)
        self._parameters.append(figures.parameters)
        self._whole.append(tuple(figures.whole.tolist()))
        return len(self._forward) - 1


class TimeBook:
    """Unit times by setting and CUDA graphs."""

    def __init__(
        self,
        model: ModelSpec,
        machine: Machine,
        *,
        seq_length: int,
        precision: str,
        workers: int | None = None,
        **run: Any,
    ) -> None:
        self._model, self._machine = model, machine
        self._seq_length, self._precision, self._run = seq_length, precision, run
        self._workers = workers or os.cpu_count() or 1
        self._table = TimeTable(model, machine)
        self._kernels: dict[Candidate, ModelKernels | InputError] = {}
        self._larger: dict[Candidate, ModelKernels | None] = {}
        self._figures: dict[tuple[Candidate, Graph], UnitFigures] = {}

    def on(self, machine: Machine) -> TimeBook:
        """The same kernels on another machine."""
        run = {"seq_length": self._seq_length, "precision": self._precision, **self._run}
        other = TimeBook(self._model, machine, workers=self._workers, **run)
        other._kernels = self._kernels
        return other

    @property
    def kinds(self) -> tuple[str, ...]:
        """The unit that each decoder layer of the model is."""
        return self._table.kinds

    @property
    def units(self) -> list[str]:
        return self._table.units

    def new_table(self) -> DerivedTimes:
        """An empty table of this model and machine."""
        return DerivedTimes(self._model, self._machine)

    def measure(self, anchors: Sequence[Candidate]) -> None:
        """Read the kernels of these settings; those without keep the reason."""
        missing = [anchor for anchor in dict.fromkeys(anchors) if anchor not in self._kernels]
        with ThreadPoolExecutor(max_workers=self._workers) as pool:
            self._kernels.update(zip(missing, pool.map(self._read, missing), strict=True))

    def keep(self, setting: Candidate, run: DryRunRequest, trace: Trace, stated: Any) -> None:
        """Keep the kernels in the trace of a dry run that was made for the setting's memory."""
        request = kernel_request(
            self._model,
            setting,
            seq_length=self._seq_length,
            precision=self._precision,
            **self._run,
        )
        keep_kernels(request, run, trace, stated)

    def _read(self, setting: Candidate) -> ModelKernels | InputError:
        from tuner.memory.worker_pool import DryRunError

        try:
            return model_kernels(
                self._model,
                setting,
                seq_length=self._seq_length,
                precision=self._precision,
                **self._run,
            )
        except InputError as error:
            return error
        except DryRunError as error:
            return InputError(f"its dry run failed: {' '.join(str(error).split())[-200:]}")

    def figures(self, setting: Candidate, graph: Graph, recipe: Recipe) -> UnitFigures | InputError:
        """Unit times of a setting: its own where its kernels were read, else from its anchors."""
        if setting in self._kernels:
            return self._own(setting, graph)
        found: dict[Candidate, UnitFigures] = {}
        for anchor in recipe.anchors():
            own = self._own(anchor, graph)
            if isinstance(own, InputError):
                return own
            found[anchor] = own
        return derived_figures(recipe, found, self._larger_batch(recipe, graph))

    def _larger_batch(self, recipe: Recipe, graph: Graph) -> UnitFigures | None:
        """Unit times of the recipe's `single` with its micro-batch; None for one, and where its
        kernels cannot be continued."""
        if recipe.batch == 1:
            return None
        setting = replace(recipe.single, micro_batch_size=recipe.batch)
        if setting not in self._larger:
            single, twice = self._kernels[recipe.single], self._kernels[recipe.twice]
            assert isinstance(single, ModelKernels)  # `figures` has looked at them
            assert isinstance(twice, ModelKernels)
            self._larger[setting] = with_batch(single, twice, recipe.batch)
        kernels = self._larger[setting]
        return None if kernels is None else self._timed(setting, graph, kernels)

    def _own(self, setting: Candidate, graph: Graph) -> UnitFigures | InputError:
        kernels = self._kernels[setting]
        return kernels if isinstance(kernels, InputError) else self._timed(setting, graph, kernels)

    def _timed(self, setting: Candidate, graph: Graph, kernels: ModelKernels) -> UnitFigures:
        key = (setting, graph)
        if key not in self._figures:
            graphed = replace(setting, cuda_graph_impl=graph[0], cuda_graph_modules=graph[1])
            row = self._table.row(kernels, graphed)
            self._figures[key] = UnitFigures(*self._row(row))
        return self._figures[key]

    def _row(self, row: int) -> tuple[Values, Values, Values, Values]:
        import numpy as np

        forward, backward, parameters, whole = self._table.arrays(np.array([row]))
        return forward[0], backward[0], parameters[0], whole[0]


def derived_figures(
    recipe: Recipe, found: dict[Candidate, UnitFigures], larger: UnitFigures | None = None
) -> UnitFigures:
    """Recomputation adds its own kernels, as many times longer as the setting's passes are.

    A larger micro-batch takes as many times longer as on the recipe's `single`, whose figures with
    it are `larger`; without these they continue the line through those of one and two.

    The host launches the same for every micro-batch, and for recomputation what that adds: only
    how long the device waits for it follows from both.
    """
    once = found[recipe.once]
    forward, backward, whole = once.forward, once.backward, once.whole
    forward_host, backward_host = _host(forward), _host(backward)
    if recipe.batch > 1:
        single = found[recipe.single]
        larger = larger or _line(single, found[recipe.twice], recipe.batch)
        forward = _grown(forward, single.forward, larger.forward, recipe.batch)
        backward = _grown(backward, single.backward, larger.backward, recipe.batch)
        whole = _grown(whole, single.whole, larger.whole, recipe.batch)
    if recipe.changed:
        plain = found[recipe.unchanged]
        longer = _compute(backward) / _compute(plain.backward)
        for anchor in recipe.changed:
            changed = found[anchor].backward
            backward = backward + longer * (changed - plain.backward)
            backward_host = backward_host + _host(changed) - _host(plain.backward)
    if recipe.batch > 1 or recipe.changed:
        forward = _waiting(forward, forward_host)
        backward = _waiting(backward, backward_host)
    return UnitFigures(forward, backward, once.parameters, whole)


def _line(single: UnitFigures, twice: UnitFigures, batch: int) -> UnitFigures:
    def continued(one: Values, two: Values) -> Values:
        return one + (batch - 1) * (two - one)

    return UnitFigures(
        continued(single.forward, twice.forward),
        continued(single.backward, twice.backward),
        single.parameters,
        continued(single.whole, twice.whole),
    )


def _grown(own: Values, single: Values, larger: Values, batch: int) -> Values:
    """`own` as many times longer as `single` becomes; where that has nothing, `batch` times."""
    import numpy as np

    nothing = single == 0
    times = larger / np.where(nothing, 1.0, single)
    result: Values = np.where(nothing, np.maximum(own * batch, larger), own * times)
    return result


_HOST = PARTS.index("host")


def _host(passes: Values) -> Values:
    """Seconds of the host in passes `[unit, part]`, `[unit]`."""
    return host_work(passes[:, _HOST], passes.sum(axis=1) - passes[:, _HOST])


def _waiting(passes: Values, host_s: Values) -> Values:
    """The passes where the host works this long for each unit."""
    result = passes.copy()
    device = passes.sum(axis=1) - passes[:, _HOST]
    result[:, _HOST] = host_wait(host_s.clip(min=0.0), device)
    return result


def _compute(passes: Values) -> float:
    return float(passes[:, PARTS.index("compute")].sum()) or 1.0
