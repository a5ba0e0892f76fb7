"""What a front end asks for beside a setting, so that a space need not say it."""

from __future__ import annotations

from dataclasses import replace

from tuner.search.space import Axis, SearchSpace

_GRAPHS, _NAN_CHECK = "cuda_graph_impl", "check_for_nan_in_loss"
_WHOLE_STEP = "full_iteration"


def for_frontend(space: SearchSpace, frontend: str) -> SearchSpace:
    """The space with switches that Megatron-LM and Megatron Bridge want beside its settings.

    Graphs of the whole step cannot look at the loss, which both check for NaN by default: without
    the switch each such candidate would be invalid (rule G31).
    """
    fields = [axis.field for axis in space.axes]
    if frontend == "mcore" or _GRAPHS not in fields or _NAN_CHECK in {*fields, *space.fixed}:
        return space
    if _WHOLE_STEP not in space.axes[fields.index(_GRAPHS)].values:
        return space
    switch = Axis(_NAN_CHECK, (False,), ((_GRAPHS, (_WHOLE_STEP,)),))
    return replace(space, axes=(*space.axes, switch))
