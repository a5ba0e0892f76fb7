"""Low-precision copies: which bytes each recipe makes of a tensor.

Follows pytorch/tensor/*.py and common/recipe/__init__.py. A quantised tensor has data for use by
rows and, separately, data for use by columns (a transpose, or blocks along the other dimension),
each with its scales. GEMMs of the forward pass read rows, weight gradients read columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te.state import process


@dataclass
class _Recipe:
    """Common part of the recipes; unknown settings of the real ones are kept and unused."""

    margin: int = 0
    fp8_format: Any = None
    fp8_dpa: bool = False
    fp8_mha: bool = False

    element_bytes = 1.0
    scale_block = 0
    scale_bytes = 0
    kind = ""

    def delayed(self) -> bool:
        return self.kind == "delayed"

    def float8_current_scaling(self) -> bool:
        return self.kind == "current"

    def float8_per_tensor_scaling(self) -> bool:
        return self.kind in ("delayed", "current")

    def mxfp8(self) -> bool:
        return self.kind == "mxfp8"

    def float8_block_scaling(self) -> bool:
        return self.kind == "block"

    def nvfp4(self) -> bool:
        return self.kind == "nvfp4"

    def custom(self) -> bool:
        return False


class DelayedScaling(_Recipe):
    """One scale per tensor from a history of maxima."""

    kind = "delayed"

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            fp8_format=settings.get("fp8_format"),
            fp8_dpa=bool(settings.get("fp8_dpa")),
            fp8_mha=bool(settings.get("fp8_mha")),
        )
        self.amax_history_len = settings.get("amax_history_len", 1024)
        self.reduce_amax = settings.get("reduce_amax", True)


class Float8CurrentScaling(_Recipe):
    """One scale per tensor from its own maximum."""

    kind = "current"


class MXFP8BlockScaling(_Recipe):
    """One byte of scale for each 32 elements."""

    kind = "mxfp8"
    scale_block, scale_bytes = 32, 1


class Float8BlockScaling(_Recipe):
    """One float32 scale for each 128 elements (tiles of 128 x 128 for weights)."""

    kind = "block"
    scale_block, scale_bytes = 128, 4


class NVFP4BlockScaling(_Recipe):
    """Half a byte an element, one byte of scale for each 16."""

    kind = "nvfp4"
    element_bytes, scale_block, scale_bytes = 0.5, 16, 1


@dataclass
class _GlobalState:
    enabled: bool = False
    recipe: Any = None
    parameters: bool = False
    stack: list[tuple[bool, Any]] = field(default_factory=list)


state = _GlobalState()


class FP8GlobalStateManager:
    """pytorch/fp8.py; answers what Megatron-Core asks."""

    IS_FIRST_FP8_MODULE = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return state.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return state.recipe

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        return False

    @classmethod
    def reset(cls) -> None:
        state.enabled, state.recipe = False, None

    @classmethod
    def get_fp8_autocast_state(cls) -> tuple[bool, Any]:
        return state.enabled, state.recipe

    @classmethod
    def set_fp8_autocast_state(cls, saved: tuple[bool, Any]) -> None:
        state.enabled, state.recipe = saved

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        pass

    @classmethod
    def add_fp8_weights_to_global_buffer(cls, *args: Any) -> None:
        pass


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    recipe: Any = None,
    **options: Any,
) -> Iterator[None]:
    """Layers called inside compute in the recipe's precision."""
    saved = (state.enabled, state.recipe)
    chosen = fp8_recipe or recipe
    state.enabled, state.recipe = enabled, chosen if enabled else None
    if enabled and chosen is None:
        state.recipe = DelayedScaling()
    try:
        yield
    finally:
        state.enabled, state.recipe = saved


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Layers made inside hold their weights in low precision."""
    from tuner.memory.errors import UnsupportedError

    if enabled:
        raise UnsupportedError(
            "weights held in low precision are not modelled", field="fp8_param", fix="unset it"
        )
    yield


def quantized(tensor: torch.Tensor, *, rows: bool, columns: bool) -> list[torch.Tensor]:
    """The storage of a low-precision copy of `tensor` in the current recipe."""
    recipe = state.recipe
    if recipe.float8_per_tensor_scaling() and process.architecture == "blackwell":
        # One copy serves rows and columns: such GPUs multiply FP8 in any layout.
        rows, columns = True, False
    copies = [_copy(tensor, recipe) for wanted in (rows, columns) if wanted]
    issue.touched(tensor, *copies, kind="quantize")
    return copies


def _copy(tensor: torch.Tensor, recipe: Any) -> torch.Tensor:
    elements = tensor.numel()
    size = int(elements * recipe.element_bytes)
    if recipe.scale_block:
        size += -(-elements // recipe.scale_block) * recipe.scale_bytes
    return allocate((size,), torch.uint8)
