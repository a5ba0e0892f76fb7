"""Recipes of low-precision training (common/recipe/__init__.py)."""

from __future__ import annotations

from typing import Any


class Recipe:
    """Common part; settings that change no allocation are kept and unused."""

    kind = ""
    element_bytes = 1.0

    def __init__(self, **settings: Any) -> None:
        self.fp8_format = settings.get("fp8_format")
        self.fp8_dpa = bool(settings.get("fp8_dpa"))
        self.fp8_mha = bool(settings.get("fp8_mha"))
        self.amax_history_len = int(settings.get("amax_history_len") or 1024)
        self.reduce_amax = settings.get("reduce_amax", True)

    @property
    def per_tensor(self) -> bool:
        """Whether a tensor has one scale."""
        return self.kind in ("delayed", "current")

    def delayed(self) -> bool:
        return self.kind == "delayed"

    def float8_current_scaling(self) -> bool:
        return self.kind == "current"

    def float8_per_tensor_scaling(self) -> bool:
        return self.per_tensor

    def mxfp8(self) -> bool:
        return self.kind == "mxfp8"

    def float8_block_scaling(self) -> bool:
        return self.kind == "block"

    def nvfp4(self) -> bool:
        return self.kind == "nvfp4"

    def custom(self) -> bool:
        return False


class DelayedScaling(Recipe):
    """One scale for each tensor from a history of maxima."""

    kind = "delayed"


class Float8CurrentScaling(Recipe):
    """One scale for each tensor from its own maximum."""

    kind = "current"


class MXFP8BlockScaling(Recipe):
    """One byte of scale for each 32 elements."""

    kind = "mxfp8"


class Float8BlockScaling(Recipe):
    """One float32 scale for each 128 elements (tiles of 128 x 128 for weights)."""

    kind = "block"


class NVFP4BlockScaling(Recipe):
    """Half a byte an element, one byte of scale for each 16."""

    kind = "nvfp4"
    element_bytes = 0.5
