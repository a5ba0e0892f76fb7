"""What measurements taught about a machine: rates with their uncertainty, as a file.

A calibration belongs to one GPU and precision. Rates are positive, and what is known of them is a
normal distribution of their logarithms: the values, and one covariance matrix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.errors import InputError
from tuner.timing.rates import Rates, documentation, spreads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tuner.hardware import Gpu

FORMAT = "tuner-calibration/1"

NAMES = tuple(f.name for f in fields(Rates))
"""The parameters, in the order of vectors and matrices."""

_LEAST_VARIANCE = 1e-4
"""Of any combination of rates, where each has a variance of 1."""

_SMALLEST = 1e-9
"""A rate of zero has no logarithm; this stands for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Rates of a GPU at a precision and how well they are known.

    `covariance` `[parameter, parameter]` is that of the rates' logarithms, in the order of `NAMES`.
    `residual_spread` is the standard deviation of the logarithm of what a step takes around the
    model's prediction, all rates being right. `measurements` counts the steps and kernels it was
    fitted to. `device` holds measured figures (fields of `Gpu`) where no data sheet has them.
    """

    gpu: str
    precision: str
    rates: Rates
    covariance: NDArray[np.float64]
    residual_spread: float = 0.05
    measurements: int = 0
    device: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    source: str = "prior"

    @classmethod
    def prior(cls, gpu: str, precision: str, rates: Rates, **known: Any) -> Calibration:
        """What is believed before any measurement: each rate within its own spread."""
        spread = spreads()
        variances = np.array([spread[name] for name in NAMES]) ** 2
        return cls(gpu, precision, rates, np.diag(variances), **known)

    def logarithms(self) -> NDArray[np.float64]:
        """Logarithms of the rates, `[parameter]`."""
        return np.log([max(getattr(self.rates, name), _SMALLEST) for name in NAMES])

    def spreads(self) -> dict[str, float]:
        """Relative uncertainty of each rate: one standard deviation of its logarithm."""
        return dict(zip(NAMES, np.sqrt(np.diag(self.covariance)).tolist(), strict=True))

    def moved(
        self, logarithms: NDArray[np.float64], covariance: NDArray[np.float64], **known: Any
    ) -> Calibration:
        """This calibration with other rates; rates of zero that did not move stay zero."""
        before = self.logarithms()
        values = {
            name: float(np.exp(new))
            for name, old, new in zip(NAMES, before, logarithms, strict=True)
            if new != old
        }
        return replace(self, rates=self.rates.with_values(values), covariance=covariance, **known)

    def measured_device(self) -> Gpu | None:
        """The device whose figures were measured here, or None: those of the data sheet hold."""
        from tuner.hardware import Gpu

        if self.device is None:
            return None
        return Gpu(
            **{**self.device, "compute_capability": tuple(self.device["compute_capability"])}
        )

    def to_json(self) -> dict[str, Any]:
        """The document of a calibration file."""
        spread, meaning = self.spreads(), documentation()
        deviations = np.sqrt(np.diag(self.covariance))
        correlation = self.covariance / np.outer(deviations, deviations)
        return {
            "format": FORMAT,
            "gpu": self.gpu,
            "precision": self.precision,
            "source": self.source,
            "measurements": self.measurements,
            "residual_spread": self.residual_spread,
            "rates": {
                name: {
                    "value": getattr(self.rates, name),
                    "spread": spread[name],
                    "meaning": meaning[name],
                }
                for name in NAMES
            },
            "correlations": _named_correlations(correlation),
            "device": None if self.device is None else dict(self.device),
            "versions": dict(self.versions),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], where: str = "") -> Calibration:
        """Read a document; parameters it lacks keep their starting values and spreads.

        Raises InputError naming what is missing or of the wrong kind.
        """
        if document.get("format") != FORMAT:
            raise InputError(
                f"{document.get('format')!r} is not {FORMAT}", where=where, field="format"
            )
        try:
            return cls._read(document)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"is not a calibration: {error!r}", where=where) from None

    @classmethod
    def _read(cls, document: Mapping[str, Any]) -> Calibration:
        entries = {k: v for k, v in document["rates"].items() if k in NAMES}
        rates = starting_rates().with_values({k: float(v["value"]) for k, v in entries.items()})
        spread = {**spreads(), **{k: float(v["spread"]) for k, v in entries.items()}}
        deviations = np.array([spread[name] for name in NAMES])
        correlation = np.eye(len(NAMES))
        for pair, value in document.get("correlations", {}).items():
            first, second = pair.split(" ")
            if first in NAMES and second in NAMES:
                i, j = NAMES.index(first), NAMES.index(second)
                correlation[i, j] = correlation[j, i] = float(value)
        return cls(
            gpu=str(document["gpu"]),
            precision=str(document["precision"]),
            rates=rates,
            covariance=_consistent(correlation) * np.outer(deviations, deviations),
            residual_spread=float(document["residual_spread"]),
            measurements=int(document["measurements"]),
            device=document.get("device"),
            versions=document.get("versions", {}),
            source=str(document.get("source", "")),
        )

    def save(self, path: Path) -> None:
        """Write the file."""
        from tuner.measurement import write_json_atomically

        write_json_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a file. Raises InputError naming it."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
        except ValueError as error:
            raise InputError(f"is not JSON: {error}", where=str(path)) from None
        if not isinstance(document, dict):
            raise InputError("is not a JSON object", where=str(path))
        return cls.from_json(document, str(path))


@cache
def starting_rates() -> Rates:
    """The rates believed of any GPU before its own are known (`data/rates.yaml`)."""
    import yaml

    text = (resources.files("tuner.timing") / "data" / "rates.yaml").read_text(encoding="utf-8")
    return Rates(**yaml.safe_load(text)["default"])


def _consistent(correlation: NDArray[np.float64]) -> NDArray[np.float64]:
    """The correlations without negative variances, which rounding and small ones left out of a
    file can bring about; positive enough to be inverted by a fit that starts from them."""
    values, vectors = np.linalg.eigh(correlation)
    if values.min() >= _LEAST_VARIANCE:
        return correlation
    repaired = (vectors * np.maximum(values, _LEAST_VARIANCE)) @ vectors.T
    size = np.sqrt(np.diag(repaired))
    result: NDArray[np.float64] = repaired / np.outer(size, size)
    return result


def _named_correlations(correlation: NDArray[np.float64]) -> dict[str, float]:
    """The correlations above a thousandth, by the names of their parameters."""
    pairs = zip(*np.triu_indices(len(NAMES), 1), strict=True)
    return {
        f"{NAMES[i]} {NAMES[j]}": round(float(correlation[i, j]), 6)
        for i, j in pairs
        if abs(correlation[i, j]) > 1e-3
    }
