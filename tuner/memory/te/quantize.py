"""Whether layers compute in low precision and by which recipe (pytorch/quantization.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te.quantized import Quantized, quantize
from tuner.memory.te.recipes import DelayedScaling, Recipe


@dataclass
class _GlobalState:
    enabled: bool = False
    recipe: Any = None
    parameters: bool = False
    keeps_initial: bool = False
    stack: list[tuple[bool, Any]] = field(default_factory=list)


state = _GlobalState()


@dataclass
class _Recompute:
    """Whether a pass in low precision will be replayed for its gradients, or is the replay."""

    enabled: bool = False
    replaying: bool = False


recompute = _Recompute()


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
    saved = (state.parameters, state.recipe, state.keeps_initial)
    state.parameters = enabled
    state.keeps_initial = preserve_high_precision_init_val
    if enabled:
        state.recipe = recipe or state.recipe or DelayedScaling()
    try:
        yield
    finally:
        state.parameters, state.recipe, state.keeps_initial = saved


@contextmanager
def using(recipe: Recipe) -> Iterator[None]:
    """Quantise by `recipe` inside, as backward passes do outside of their autocast."""
    saved, state.recipe = state.recipe, recipe
    try:
        yield
    finally:
        state.recipe = saved


def current_recipe() -> Recipe:
    """The recipe of the layer that runs now."""
    recipe: Recipe = state.recipe
    return recipe


def quantized(tensor: torch.Tensor, role: str, *, rows: bool, columns: bool) -> Quantized:
    """A low-precision copy of `tensor` in the current recipe."""
    copy = quantize(current_recipe(), role, tensor.shape, rows=rows, columns=columns)
    issue.touched(tensor, *copy.tensors, kind="quantize")
    return copy


def quantizer_state(products: int) -> list[torch.Tensor]:
    """What a layer with so many matrix products keeps for its quantisers.

    Three tensors of each product are quantised forward, two backward. Delayed scaling keeps scales
    and maxima of the last steps for all of them (`DelayedScalingRecipeState`), current scaling a
    scale and a maximum for each (`Float8CurrentScalingQuantizer`).
    """
    recipe = current_recipe()
    counts = (3 * products, 2 * products)
    if recipe.kind == "delayed":
        return [
            allocate(shape, torch.float32)
            for count in counts
            for shape in ((count,), (recipe.amax_history_len, count))
        ]
    if recipe.kind == "current":
        return [allocate((1,), torch.float32) for _ in range(2 * sum(counts))]
    return []
