"""Calibrations that come with the package: one file for each GPU, one entry for each precision.

Fitted to published runs by `fit_hierarchy`; the same function calibrates any set of measured steps.
A fit goes from the general to the particular: all runs of an architecture, those of one GPU, those
of one precision on it. Each level starts from what the one above found, so that few runs of a kind
move only what sets them apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.candidate import Candidate
from tuner.hardware import get_gpu
from tuner.precision import arithmetic, short_name
from tuner.timing.calibration import NAMES, Calibration, starting_rates
from tuner.timing.rates import spreads

if TYPE_CHECKING:
    from tuner.timing.observations import Observation

EVERY = "every"
"""Stands for the precision of a calibration that holds for a GPU as a whole."""

_BETWEEN_GPUS = 0.5
"""How far GPUs of one architecture lie apart, in units of a rate's own spread."""

_BETWEEN_PRECISIONS = 0.5
_OF_A_PRECISION = (
    *("gemm", "half_gemm", "grouped_gemm", "quantize", "memory", "host_kernel_s"),
    "older_software",
)
"""Rates that differ between precisions on one GPU."""

_RESIDUAL = 0.07
"""Spread of steps around the model that is expected before any fit."""


def precision_key(candidate: Candidate, precision: str = "bf16") -> str:
    """The precision that a calibration is filed under (`tuner.precision.arithmetic`)."""
    return arithmetic(dict(candidate.extra), precision)


def shipped_calibration(gpu: str, precision: str = EVERY) -> Calibration:
    """The packaged calibration of a GPU and precision (any of its names), or the nearest there is.

    A GPU without measurements takes what is known of its architecture, and else starting values,
    with the uncertainty of either.
    """
    known = get_gpu(gpu)
    entries = _entries().get(known.name) or _entries().get(known.architecture, {})
    precision = short_name(precision)
    document = entries.get(precision) or entries.get(EVERY)
    if document is None:
        return Calibration.prior(known.name, precision, starting_rates())
    found = Calibration.from_json(document)
    if found.gpu != known.name:
        found = _wider(found, _BETWEEN_GPUS)
    return replace(found, gpu=known.name, precision=precision)


@cache
def _entries() -> dict[str, dict[str, Any]]:
    """Documents by GPU or architecture, and precision."""
    folder = resources.files("tuner.timing") / "data" / "calibrations"
    if not folder.is_dir():
        return {}
    found: dict[str, dict[str, Any]] = {}
    for entry in folder.iterdir():
        if entry.name.endswith(".json"):
            document = json.loads(entry.read_text(encoding="utf-8"))
            found[document["device"]] = document["precisions"]
    return found


def fit_hierarchy(observations: Sequence[Observation]) -> dict[tuple[str, str], Calibration]:
    """Calibrations by (architecture or GPU, precision or `EVERY`) from steps of any GPUs."""
    found: dict[tuple[str, str], Calibration] = {}
    start = replace(Calibration.prior("", EVERY, starting_rates()), residual_spread=_RESIDUAL)
    for architecture, mine in _grouped(observations, _architecture).items():
        top = _fitted(start, mine)
        found[architecture, EVERY] = replace(top, gpu=architecture)
        for gpu, runs in _grouped(mine, lambda one: get_gpu(one.gpu).name).items():
            middle = _fitted(_wider(top, _BETWEEN_GPUS), runs)
            found[gpu, EVERY] = replace(middle, gpu=gpu)
            for precision, few in _grouped(runs, lambda one: one.precision).items():
                wider = _wider(middle, _BETWEEN_PRECISIONS, _OF_A_PRECISION)
                own = _fitted(wider, few, _OF_A_PRECISION)
                found[gpu, precision] = replace(own, gpu=gpu, precision=precision)
    return found


def documents(calibrations: Mapping[tuple[str, str], Calibration]) -> dict[str, dict[str, Any]]:
    """The content of the files under `data/calibrations`, by device."""
    files: dict[str, dict[str, Any]] = {}
    for (device, precision), calibration in sorted(calibrations.items()):
        entry = files.setdefault(device, {"device": device, "precisions": {}})
        entry["precisions"][precision] = calibration.to_json()
    return files


def _fitted(
    prior: Calibration, observations: Sequence[Observation], parameters: Sequence[str] = NAMES
) -> Calibration:
    from tuner.timing.fitting import fit
    from tuner.timing.observations import predictor

    measured = [one.step_time_s for one in observations]
    predict = predictor(observations, prior)
    return fit(prior, predict, measured, parameters=parameters).calibration


def _wider(calibration: Calibration, share: float, names: Sequence[str] = NAMES) -> Calibration:
    """What a calibration says of another device or precision: less sure of these rates."""
    spread = spreads()
    added = [(share * spread[name]) ** 2 if name in names else 0.0 for name in NAMES]
    covariance = calibration.covariance + np.diag(added)
    return replace(calibration, covariance=covariance, measurements=0)


def _architecture(observation: Observation) -> str:
    return get_gpu(observation.gpu).architecture


def _grouped(observations: Sequence[Observation], key: Any) -> dict[str, list[Observation]]:
    groups: dict[str, list[Observation]] = {}
    for one in observations:
        groups.setdefault(str(key(one)), []).append(one)
    return groups
