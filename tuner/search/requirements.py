"""What a job asks of every candidate besides validity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.search.enumeration import ValidCandidates
from tuner.search.records import Rejection
from tuner.search.space import label_of
from tuner.search.table import fields_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)


@dataclass(frozen=True, slots=True)
class Requirements:
    """Free memory, data-parallel replicas, and values that no candidate may have."""

    min_free_bytes: float = 0.0
    min_data_parallel_size: int = 1
    forbid: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def rejection(self, candidate: Candidate, world_size: int) -> Rejection | None:
        """Why a candidate does not meet them, free memory aside; None where it does."""
        replicas = world_size // max(1, candidate.model_parallel_size())
        if replicas < self.min_data_parallel_size:
            return Rejection(
                "require.min_data_parallel_size",
                f"{replicas} data-parallel replicas are below {self.min_data_parallel_size}",
            )
        fields = fields_of(candidate)
        for name, values in self.forbid.items():
            value = fields.get(name, getattr(candidate, name, None))
            if label_of(value) in {label_of(v) for v in values}:
                return Rejection("require.forbid", f"{name}={value} is forbidden by the job")
        return None

    def met(self, block: ValidCandidates, world_size: int) -> NDArray[np.bool_]:
        """Which candidates of a block meet them, free memory aside, `[row]`."""
        import numpy as np

        rows = len(block)
        ranks = np.ones(rows, dtype=np.int64)
        for name in _SIZES:
            ranks = ranks * self._numbers(block, name, rows)
        result = world_size // np.maximum(ranks, 1) >= self.min_data_parallel_size
        for name, forbidden in self.forbid.items():
            labels = {label_of(value) for value in forbidden}
            values, codes = _column(block, name, rows)
            bad = np.array([label_of(_default(name, value)) in labels for value in values])
            result &= ~bad[codes]
        return result

    def _numbers(self, block: ValidCandidates, name: str, rows: int) -> NDArray[np.int64]:
        import numpy as np

        values, codes = _column(block, name, rows)
        return np.array([int(_default(name, value) or 1) for value in values])[codes]


def _column(block: ValidCandidates, name: str, rows: int) -> tuple[Sequence[Any], Any]:
    import numpy as np

    if name in block.codes:
        return block.values[name], block.codes[name]
    return [block.fixed.get(name)], np.zeros(rows, dtype=np.int64)


def _default(name: str, value: Any) -> Any:
    from tuner.candidate import DEFAULTS
    from tuner.constraints.view import UNSET

    return DEFAULTS.get(name) if value is UNSET or value is None else value
