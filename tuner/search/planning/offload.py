"""What offload to the host saves and costs, for arrays of candidates.

Bytes that leave a layer's saved activations are measured by a profile with the modules offloaded;
the rest is the arithmetic of `tuner.timing.offload`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.constraints.view import UNSET
from tuner.search.enumeration import ValidCandidates
from tuner.search.planning.workplace import Workplace
from tuner.timing.offload import host_update_s, transfer_wait

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]
    Rows = NDArray[np.int64]


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

    `share` is the part of the layers' saved bytes that is off the device at the peak, `moved` the
    part that is moved at all. `fraction` is the part of the optimizer's state that
    is on the host, whose transfers `overlapped` says run beside the updates.
    """

    share: Values
    moved: Values
    fraction: Values
    overlapped: NDArray[np.bool_]

    @classmethod
    def nothing(cls, rows: int) -> Offload:
        """No offload."""
        import numpy as np

        none = np.zeros(rows)
        return cls(none, none, none, np.zeros(rows, dtype=bool))

    def at(self, rows: Any) -> Offload:
        """Of these rows alone."""
        return Offload(*(getattr(self, name)[rows] for name in self.__slots__))

    def and_also(self, other: Offload) -> Offload:
        """Both, of which one or the other moves nothing."""
        return Offload(
            self.share + other.share,
            self.moved + other.moved,
            self.fraction + other.fraction,
            self.overlapped | other.overlapped,
        )

    def where(self, keeps: Values) -> Offload:
        """The same, without activations where layers do not keep any (0 in `keeps`, else 1)."""
        return replace(self, share=self.share * keeps, moved=self.moved * keeps)

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

    def added(self, passes: Passes, parameters: Values, place: Workplace) -> tuple[Values, Values]:
        """Seconds that each step waits for activations, and that the host's optimizer takes.

        A rank updates `parameters`. A third of what a layer computes is its
        forward pass.
        """
        import numpy as np

        gpu, rates = place.gpu, place.rates
        moved = self.moved * passes.layer_bytes
        layer = passes.compute_s / passes.microbatches / passes.layers
        waits = sum(transfer_wait(moved, layer * part, gpu, rates) for part in (1 / 3, 2 / 3))
        waits = waits * passes.layers * passes.microbatches
        update = np.where(
            self.overlapped,
            host_update_s(gpu, rates, overlapped=True),
            host_update_s(gpu, rates),
        )
        return waits, self.fraction * parameters * update


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
