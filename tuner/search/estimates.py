"""What the search is told of candidates before any of them runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tuner.candidate import Candidate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Figures = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimates:
    """Predictions, arrays `[candidate]`.

    `memory_bytes` is the peak of allocated bytes on the fullest rank, `step_time_s` that of an
    optimizer step. The parts sum to them: seconds by cause, bytes by kind. NaN where a candidate
    cannot be estimated.
    """

    step_time_s: Figures
    memory_bytes: Figures
    time_parts: Mapping[str, Figures] = field(default_factory=dict)
    memory_parts: Mapping[str, Figures] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.step_time_s)


class Estimator(Protocol):
    """Anything that predicts memory and step time of many candidates."""

    def __call__(self, candidates: Sequence[Candidate]) -> Estimates: ...


def no_estimates(candidates: Sequence[Candidate]) -> Estimates:
    """An estimator that knows nothing: every figure is NaN."""
    import numpy as np

    unknown = np.full(len(candidates), np.nan)
    return Estimates(unknown, unknown)
