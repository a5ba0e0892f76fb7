"""What the optimizer's step holds while it runs, by parameter.

Some of it is there for all parameters of a rank at once, such as gradients copied to float32; some
only for the group being updated, such as moments widened for the kernel (the chained optimizers of
dense and of expert parameters step one after the other).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.memory.kernel_log import KIND

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tuner.memory.trace import Trace

_NEARLY = 0.98


def bytes_per_parameter(
    trace: Trace, added: NDArray[np.int64], first_event: int, parameters: float
) -> tuple[float, float]:
    """Bytes held for each of `parameters`, and for each one of the group being updated.

    `added` are the bytes that the step holds, `[event]`, from `first_event` of the trace on. Where
    the most is held while no group is updated, all of it counts as held for every parameter.
    """
    peak = max(0.0, float(added.max(initial=0)))
    kernels = trace.kernels
    inside = (kernels.kind == KIND["optimizer"]) & (kernels.event > first_event)
    inside &= kernels.event <= first_event + len(added)
    touched = kernels.bytes[inside]
    held = added[kernels.event[inside] - first_event - 1].astype(float)
    if len(touched) < 2 or held.max() < _NEARLY * peak:
        return peak / parameters, 0.0
    members = touched / touched.sum() * parameters
    large, small = members.argmax(), members.argmin()
    if members[large] < 2 * members[small] or held[large] <= held[small]:
        return peak / parameters, 0.0
    grouped = (held[large] - held[small]) / (members[large] - members[small])
    common = (peak - grouped * members[held.argmax()]) / parameters
    return max(0.0, float(common)), float(grouped)
