"""What offload to the host saves and costs, for arrays of candidates.

Bytes that leave a layer's saved activations are measured by a profile with the modules offloaded;
the rest is arithmetic. Transfers run beside the passes that compute meanwhile, and what does not
fit beside them is waited for. The optimizer's share on the host is updated there: gradients come
down in 4 bytes a parameter, weights go back in 2, and Adam reads and writes 28 bytes of state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.constraints.view import UNSET
from tuner.search.enumeration import ValidCandidates
from tuner.search.planning.workplace import Workplace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]
    Rows = NDArray[np.int64]

_HIDDEN = 0.7  # of a pass that transfers can run beside: attention and products, not their tails
_OPTIMIZER_BYTES = 4 + 2 + 28
_STATE_BYTES = 12  # of Adam's moments and master weight


@dataclass(frozen=True, slots=True)
class Passes:
    """Steps without offload, arrays `[row]`, and what transfers run beside.

    `step_s` is a step, `spent` `[row, part]` what it is made of, `compute_s` what a stage computes
    in it; `layer_bytes` are saved by a layer for a micro-batch; a stage has `layers`, a step
    `microbatches`.
    """

    step_s: Values
    spent: Values
    compute_s: Values
    layer_bytes: Values
    layers: Values
    microbatches: Values

    def at(self, rows: Any) -> Passes:
        """These rows."""
        return Passes(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Offload:
    """Offload of candidates, arrays `[row]`.

    `share` is the part of a layer's saved bytes that leaves the device, `fraction` that of the
    optimizer's state.
    """

    share: Values
    fraction: Values

    def at(self, rows: Any) -> Offload:
        """Of these rows alone."""
        return Offload(self.share[rows], self.fraction[rows])

    def and_also(self, other: Offload) -> Offload:
        """Both, of which one or the other moves nothing."""
        return Offload(self.share + other.share, self.fraction + other.fraction)

    def remaining(self, parts: Values, step_bytes: Values) -> Values:
        """What stays on the device of bytes by part `[row, part]` (`MEMORY_PARTS`).

        Of activations, `step_bytes` `[row]` are there in the optimizer's step and no pass's.
        """
        import numpy as np

        kept = parts.copy()
        kept[:, 2] *= 1.0 - self.fraction
        kept[:, 3] = np.maximum(
            parts[:, 3] * (1.0 - self.share), step_bytes * (1.0 - self.fraction)
        )
        return kept

    def added(self, passes: Passes, state_bytes: Values, place: Workplace) -> Values:
        """Seconds that transfers and the host's optimizer add to each step.

        `state_bytes` is the optimizer state of a rank. A hidden transfer slows down what it runs
        beside by `contention` of its own time.
        """
        import numpy as np

        bandwidth = place.host_bytes_per_s
        moved = self.share * passes.layer_bytes * passes.layers / bandwidth
        forward = _HIDDEN * passes.compute_s / passes.microbatches / 3
        exposed = np.maximum(0.0, moved - forward) + np.maximum(0.0, moved - 2 * forward)
        exposed = exposed + place.rates.contention * (2 * moved - exposed)
        parameters = self.fraction * state_bytes / _STATE_BYTES
        result: Values = passes.microbatches * exposed + parameters * _OPTIMIZER_BYTES / bandwidth
        return result


def combined(
    block: ValidCandidates, names: Sequence[str], rows: int
) -> tuple[Rows, list[tuple[Any, ...]]]:
    """The combination of these fields in each row, as a number among the distinct ones; None where
    a field is not set."""
    import numpy as np

    code = np.zeros(rows, dtype=np.int64)
    offered: list[tuple[Any, ...]] = [()]
    for name in names:
        values = list(block.values.get(name, [block.fixed.get(name, UNSET)]))
        own = block.codes.get(name)
        code = code * len(values) + (0 if own is None else own)
        offered = [(*combination, value) for combination in offered for value in values]
    used, number = np.unique(code, return_inverse=True)
    chosen = [offered[place] for place in used]
    return number.astype(np.int64), [
        tuple(None if value is UNSET else value for value in values) for values in chosen
    ]
