"""The candidates a study chooses from, with what is predicted of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tuner.search.estimates import Estimates
from tuner.search.guide import guided_log_time
from tuner.search.table import CandidateTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Pool:
    """Candidates with their estimates, for one memory limit.

    `world_sizes` are the GPUs of each candidate's trial, `steps` how many steps a trial runs and
    `overhead_s` what it takes besides them.
    """

    table: CandidateTable
    estimates: Estimates
    limit_bytes: float
    world_sizes: Sequence[int]
    overhead_s: float = 60.0
    steps: int = 5

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def gpus(self) -> Vector:
        """GPUs of each candidate's trial."""
        import numpy as np

        return np.asarray(self.world_sizes, dtype=np.float64)

    @cached_property
    def log_time(self) -> Vector:
        """Log of the predicted GPU-seconds of a step.

        Where nothing is predicted for any candidate the decision guide orders them; a single
        candidate without a prediction is taken to be as slow as the slowest one that has one.
        """
        import numpy as np

        time = self.estimates.step_time_s * self.gpus
        known = np.isfinite(time) & (time > 0)
        if not known.any():
            return guided_log_time(self.table.candidates) + np.log(self.gpus)
        result: Vector = np.log(np.where(known, time, time[known].max()))
        return result

    @cached_property
    def log_fill(self) -> Vector:
        """Log of predicted peak memory over the limit; 0 where it is not predicted."""
        import numpy as np

        memory = self.estimates.memory_bytes
        known = np.isfinite(memory) & (memory > 0)
        result: Vector = np.log(np.where(known, memory, self.limit_bytes) / self.limit_bytes)
        return result

    def trial_cost(self, rows: NDArray[np.int64], log_time: Vector) -> Vector:
        """GPU-seconds of a trial of each row, given its log GPU-seconds a step."""
        import numpy as np

        result: Vector = self.overhead_s * self.gpus[rows] + self.steps * np.exp(log_time)
        return result
