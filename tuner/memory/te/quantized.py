"""Storage of low-precision tensors (pytorch/tensor/*.py, csrc/quantizer.cpp).

A quantised tensor has data that products read by rows and, separately, data read by columns, each
with its scales. Which of them exist differs by recipe and GPU: products with one scale for each
tensor read a transpose by columns on Hopper and the same data on Blackwell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tuner.memory.recorder import allocate
from tuner.memory.te.recipes import Recipe
from tuner.memory.te.state import process

INPUT, WEIGHT, GRADIENT = "input", "weight", "gradient"
"""What a quantised tensor is; block recipes scale weights by square tiles."""

_MXFP8_BLOCK, _FP8_BLOCK, _NVFP4_BLOCK = 32, 128, 16
_VIEW_ALIGNMENT, _SCALE_ALIGNMENT = 256, 16
"""Alignment of the parts of one buffer that holds the copies of several tensors (csrc/cast.cpp)."""


class Quantized:
    """Low-precision data of one tensor, or of several in one place.

    `rows` and `columns` hold the storage read by rows and by columns, `shared` what both need.
    """

    __slots__ = ("columns", "recipe", "role", "rows", "shape", "shared")

    def __init__(self, recipe: Recipe, role: str, shape: tuple[int, int]) -> None:
        self.recipe, self.role, self.shape = recipe, role, shape
        self.rows: list[torch.Tensor] = []
        self.columns: list[torch.Tensor] = []
        self.shared: list[torch.Tensor] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All storage, for `save_for_backward`."""
        return [*self.rows, *self.columns, *self.shared]

    @property
    def lacks_columns(self) -> bool:
        """Whether products cannot read it by columns."""
        return not self.columns and not _one_layout(self.recipe)

    def only_rows(self) -> None:
        """Free what is read by columns alone."""
        self.columns = []

    def only_columns(self) -> None:
        """Free what is read by rows alone."""
        if not _one_layout(self.recipe):
            self.rows = []

    def add_columns(self) -> None:
        """Make what is read by columns from the rows, where this recipe can (`update_usage`)."""
        if not self.lacks_columns:
            return
        if self.recipe.per_tensor or (self.recipe.kind == "block" and self.role == WEIGHT):
            self.make_columns()

    def make_columns(self) -> None:
        """Make what is read by columns, needed or not."""
        self.columns = _storage(self.recipe, self.role, self.shape, columns=True)


def quantize(
    recipe: Recipe, role: str, shape: Sequence[int], *, rows: bool, columns: bool
) -> Quantized:
    """A new low-precision copy of a tensor of `shape` (leading dimensions are rows)."""
    flat = flat_shape(shape)
    result = Quantized(recipe, role, flat)
    if recipe.per_tensor:
        result.shared = [allocate((1,), torch.float32)]
    if rows or (columns and _one_layout(recipe)):
        result.rows = _storage(recipe, role, flat, columns=False)
    if columns and not _one_layout(recipe):
        result.columns = _storage(recipe, role, flat, columns=True)
    return result


def quantize_parts(
    recipe: Recipe, width: int, parts: Sequence[int], role: str, *, rows: bool, columns: bool
) -> Quantized:
    """Copies of consecutive parts of one tensor, given by their rows (`split_quantize`).

    Recipes with blocks put all parts in one buffer, the others make one tensor for each part.
    """
    result = Quantized(recipe, role, (sum(parts), width))
    if recipe.per_tensor or not _joins_parts(recipe):
        for part in parts:
            piece = quantize(recipe, role, (part, width), rows=rows, columns=columns)
            result.rows += piece.rows
            result.columns += piece.columns
            result.shared += piece.shared
        return result
    if rows:
        result.rows = [_joined(recipe, role, width, parts, columns=False)]
    if columns:
        result.columns = [_joined(recipe, role, width, parts, columns=True)]
    return result


def gathered(source: Quantized, ranks: int, *, columns: bool) -> Quantized:
    """The copies of all `ranks` joined along the rows (`gather_along_first_dim`).

    By rows for a forward product, with `columns` for a weight gradient.
    """
    recipe, (rows, width) = source.recipe, source.shape
    whole = Quantized(recipe, source.role, (rows * ranks, width))
    whole.shared = source.shared
    if recipe.per_tensor or not columns:
        whole.rows = _storage(recipe, source.role, whole.shape, columns=False)
    if not columns or recipe.per_tensor:
        return whole
    # Before 2.10 MXFP8Quantizer.make_empty made rows as well.
    spare: list[torch.Tensor] = []
    if recipe.kind == "mxfp8" and process.version < (2, 10):
        spare = _storage(recipe, source.role, whole.shape, columns=False)
    whole.columns = _storage(recipe, source.role, whole.shape, columns=True)
    if recipe.kind in ("block", "nvfp4"):
        # Columns arrive rank by rank, and are put in order in a second buffer.
        arrived, whole.columns = (
            whole.columns,
            _storage(recipe, source.role, whole.shape, columns=True),
        )
        del arrived
    whole.rows = spare
    return whole


def _one_layout(recipe: Recipe) -> bool:
    """Whether products read the same data by rows and by columns (`non_tn_fp8_gemm`)."""
    return recipe.per_tensor and process.architecture == "blackwell"


def _joins_parts(recipe: Recipe) -> bool:
    return recipe.kind != "nvfp4" or process.version >= (2, 11)


def flat_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and width of a tensor of `shape`."""
    return math.prod(shape[:-1]), shape[-1]


def _storage(
    recipe: Recipe, role: str, shape: tuple[int, int], *, columns: bool
) -> list[torch.Tensor]:
    """Data and scales of one tensor by rows or by columns."""
    data, scales, fixed = _sizes(recipe, role, shape, columns)
    return [allocate((size,), torch.uint8) for size in (data, scales, fixed) if size]


def _joined(
    recipe: Recipe, role: str, width: int, parts: Sequence[int], *, columns: bool
) -> torch.Tensor:
    """One buffer with the data of every part, then the scales of every part."""
    sizes = [_sizes(recipe, role, (part, width), columns) for part in parts]
    total = 0
    for data, _, _ in sizes:
        total = _round_up(total, _VIEW_ALIGNMENT) + data
    for _, scales, fixed in sizes:
        total = _round_up(total, _SCALE_ALIGNMENT) + scales + fixed
    return allocate((total,), torch.uint8)


def _sizes(
    recipe: Recipe, role: str, shape: tuple[int, int], columns: bool
) -> tuple[int, int, int]:
    """Bytes of data, of block scales and of a scale of the whole (`get_scale_shape`)."""
    rows, width = shape
    elements = rows * width
    if recipe.kind == "mxfp8":
        return elements, _mxfp8_scales(rows, width, columns), 0
    if recipe.kind == "block":
        return elements, 4 * _block_scales(rows, width, columns, tiles=role == WEIGHT), 0
    if recipe.kind == "nvfp4":
        inner, outer = (rows, width) if columns else (width, rows)
        scales = _round_up(outer, 128) * _round_up(_blocks(inner, _NVFP4_BLOCK), 4)
        return elements // 2, scales, 4
    return elements, 0, 0


def _mxfp8_scales(rows: int, width: int, columns: bool) -> int:
    if columns:
        return _round_up(_blocks(rows, _MXFP8_BLOCK), 4) * _round_up(width, 128)
    return _round_up(rows, 128) * _round_up(_blocks(width, _MXFP8_BLOCK), 4)


def _block_scales(rows: int, width: int, columns: bool, *, tiles: bool) -> int:
    across = (width, rows) if columns else (rows, width)
    if tiles:
        return _blocks(across[0], _FP8_BLOCK) * _round_up(_blocks(across[1], _FP8_BLOCK), 4)
    blocks, other = (rows, width) if columns else (width, rows)
    return _blocks(blocks, _FP8_BLOCK) * _round_up(other, 4)


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def saved_tensors(parts: Sequence[Any]) -> list[torch.Tensor | None]:
    """`parts` for `save_for_backward`: quantised ones as the storage they hold."""
    flat: list[torch.Tensor | None] = []
    for part in parts:
        flat += part.tensors if isinstance(part, Quantized) else [part]
    return flat
