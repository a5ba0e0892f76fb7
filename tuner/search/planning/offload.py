"""What offload to the host saves and costs, for arrays of candidates.

Bytes that leave a layer's saved activations are measured by a profile with the modules offloaded;
the rest is arithmetic. Transfers run beside the passes that compute meanwhile, and what does not
fit beside them is waited for. The optimizer's share on the host is updated there: gradients come
down in 4 bytes a parameter, weights go back in 2, and Adam reads and writes 28 bytes of state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

_HIDDEN = 0.7  # of a pass that transfers can run beside: attention and products, not their tails
_OPTIMIZER_BYTES = 4 + 2 + 28
_STATE_BYTES = 12  # of Adam's moments and master weight


@dataclass(frozen=True, slots=True)
class Offload:
    """Offload of candidates, arrays `[row]`.

    `share` is the part of a layer's saved bytes that leaves the device, `fraction` that of the
    optimizer's state.
    """

    share: Values
    fraction: Values

    def activations(self, held: Values) -> Values:
        """Bytes of activations that stay on the device."""
        result: Values = held * (1.0 - self.share)
        return result

    def optimizer(self, held: Values) -> Values:
        """Bytes of optimizer state that stay on the device."""
        result: Values = held * (1.0 - self.fraction)
        return result

    def seconds(
        self,
        *,
        layer_bytes: Values,
        layers: Values,
        microbatches: Values,
        compute_s: Values,
        state_bytes: Values,
        host_bytes_per_s: float,
        contention: float,
    ) -> Values:
        """Seconds of a step that transfers and the host's optimizer add.

        `layer_bytes` is saved by a layer for a micro-batch, `layers` a stage has, `compute_s` a
        stage computes in a step, `state_bytes` is the optimizer state of a rank. A hidden
        transfer slows down what it runs beside by `contention` of its own time.
        """
        import numpy as np

        moved = self.share * layer_bytes * layers / host_bytes_per_s
        forward = _HIDDEN * compute_s / microbatches / 3
        exposed = np.maximum(0.0, moved - forward) + np.maximum(0.0, moved - 2 * forward)
        exposed = exposed + contention * (2 * moved - exposed)
        parameters = self.fraction * state_bytes / _STATE_BYTES
        result: Values = microbatches * exposed + parameters * _OPTIMIZER_BYTES / host_bytes_per_s
        return result
