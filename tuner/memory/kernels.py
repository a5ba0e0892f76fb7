"""A stand-in for Triton whose kernels do nothing.

Megatron-Core launches some kernels of its own (fusions/fused_mla_yarn_rope_apply.py and others)
from functions that make the buffers themselves; without data only the buffers matter.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.utils._triton

from trainables.megatron_core.cpu_device import replaced


class _Kernel:
    """What `@triton.jit` makes: `kernel[grid](...)` launches it."""

    def __init__(self, function: Any) -> None:
        self.fn = function

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


def _jit(function: Any = None, **options: Any) -> Any:
    return _Kernel(function) if function is not None else _Kernel


def _unchanged(*args: Any, **options: Any) -> Any:
    """`@triton.autotune(...)` and its like, which tune a kernel."""
    return lambda kernel: kernel


class _Language(ModuleType):
    """`triton.language`: names in kernels' signatures and bodies, none of which runs."""

    constexpr = staticmethod(lambda value=None: value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


@contextmanager
def triton_launches_nothing() -> Iterator[None]:
    """Make `import triton` give the stand-in inside this context; PyTorch itself sees none."""
    triton, language = ModuleType("triton"), _Language("triton.language")
    contents = {
        "__version__": "3.0.0",
        "__path__": [],
        "jit": _jit,
        "autotune": _unchanged,
        "heuristics": _unchanged,
        "Config": lambda *args, **options: None,
        "cdiv": lambda a, b: -(-a // b),
        "next_power_of_2": lambda n: 1 << max(0, n - 1).bit_length(),
        "language": language,
    }
    vars(triton).update(contents)
    made: dict[str, ModuleType] = {"triton": triton, "triton.language": language}
    for name, module in made.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    with modules_in_place(made), replaced(torch.utils._triton, has_triton_package=lambda: False):
        yield


@contextmanager
def modules_in_place(made: dict[str, ModuleType]) -> Iterator[None]:
    """Let `import` find these modules under these names inside this context."""
    before = {name: sys.modules[name] for name in made if name in sys.modules}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]
        sys.modules.update(before)
