"""Names of the marks that `boundaries` sets in a trace."""

from __future__ import annotations

FORWARD_START = "forward start"
FORWARD_END = "forward end"
BACKWARD_START = "backward start"
BACKWARD_END = "backward end"
HEAD_BACKWARD_END = "head backward end"
LAYERS_FORWARD_END = "layers forward end"
"""After a recomputed last layer this is later than the end of the layer itself."""

OWN_PRODUCT = {False: "own product forward", True: "own product backward"}
"""PyTorch itself multiplies matrices, on the thread of forward or of backward passes."""

MTP_FORWARD_END = "mtp forward end"
MTP_BACKWARD_END = "mtp backward end"


def layer_forward_start(layer: int) -> str:
    return f"layer {layer} forward start"


def layer_forward_end(layer: int) -> str:
    return f"layer {layer} forward end"


def layer_backward_end(layer: int) -> str:
    return f"layer {layer} backward end"
