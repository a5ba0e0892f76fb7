"""What the packages need to import and decide without a GPU and without Transformer Engine.

* Names of the standard library that older interpreters lack (``typing.override``).
* Importable stand-ins for compiled packages, answered by a meta-path finder: a CamelCase
  attribute is an ``nn.Module`` subclass, anything else a callable that returns None.
* The version of Transformer Engine and the GPU of a candidate, switchable per candidate.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: What is "installed" when a candidate does not say; new enough for every version's checks.
DEFAULT_TE_VERSION = "2.14.0"
NO_TE = "none"
TE_PACKAGES = ("transformer_engine", "transformer_engine_torch")
STUBBED_FOR_MCORE = (*TE_PACKAGES, "triton", "einops", "deep_ep")

STUB_VERSION = dict.fromkeys(TE_PACKAGES, DEFAULT_TE_VERSION) | {"triton": "3.5.0"}

CAPABILITY = {"a100": (8, 0), "h100": (9, 0), "b200": (10, 0), "gb200": (10, 0)}
DEVICE_NAME = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "b200": "NVIDIA B200",
    "gb200": "NVIDIA GB200",
}
DEFAULT_GPU = "h100"


class _FusedAdam:
    """Only the signature counts: OptimizerConfig looks for these argument names."""

    def __init__(
        self,
        params: Any = None,
        master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        del params


def _split_ranks(ranks: Any, pattern: str, **sizes: int) -> Any:
    """``einops.rearrange`` for the one pattern of ``create_hierarchical_groups``."""
    if pattern != "(l s u) -> (l u) s":
        raise NotImplementedError(pattern)
    outer, size, inner = sizes["l"], sizes["s"], sizes["u"]
    return ranks.reshape(outer, size, inner).transpose(0, 2, 1).reshape(outer * inner, size)


class _StubModule(types.ModuleType):
    """A package whose every attribute exists."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stub_attribute(self.__name__, name)
        setattr(self, name, value)
        return value


def _init_anything(self: Any, *_: Any, **__: Any) -> None:
    import torch

    torch.nn.Module.__init__(self)


def _stub_attribute(module: str, name: str) -> Any:
    import torch

    if name == "FusedAdam":
        return _FusedAdam
    if name[:1].isupper():
        return type(name, (torch.nn.Module,), {"__module__": module, "__init__": _init_anything})

    return _StubFunction(module, name)


class _StubFunction:
    """Stands for a function, a decorator or a submodule reached as an attribute."""

    def __init__(self, module: str, name: str) -> None:
        self.__module__ = module
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # a decorator hands its function back
        return self if self.__name__ in ("jit", "autotune", "heuristics") else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub_attribute(f"{self.__module__}.{self.__name__}", name)


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of the given top-level packages and everything below them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)
        self.hidden: frozenset[str] = frozenset()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        top = fullname.split(".")[0]
        if top in self.hidden:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        if not any(fullname == one or fullname.startswith(one + ".") for one in self.packages):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _StubModule(spec.name)
        if spec.name == "einops":
            module.__dict__["rearrange"] = _split_ranks
        module.__dict__["__version__"] = STUB_VERSION.get(spec.name, "1.0.0")
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def install(packages: Sequence[str]) -> _StubFinder:
    """Makes ``packages`` importable and supplies what an older interpreter lacks."""
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    # No check compiles anything, and torch's compiler must not meet the triton stand-in.
    import torch

    torch.compile = lambda model=None, **_: model if model is not None else lambda one: one

    finder = _StubFinder(packages)
    sys.meta_path.insert(0, finder)
    return finder


class _HollowPackage(types.ModuleType):
    """A real package whose ``__init__`` is not run: its modules import, its names are looked up.

    ``owners`` says which module of the package holds a name; any other name is a stand-in class.
    """

    owners: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self.owners:
            return getattr(importlib.import_module(f"{self.__name__}.{self.owners[name]}"), name)
        return _stub_attribute(self.__name__, name)


def hollow(name: str, owners: dict[str, str]) -> None:
    """Registers the package ``name`` without running its ``__init__``."""
    parent, _, child = name.rpartition(".")
    package = _HollowPackage(name)
    package.__path__ = [f"{folder}/{child}" for folder in importlib.import_module(parent).__path__]
    package.owners = owners
    sys.modules[name] = package
    setattr(importlib.import_module(parent), child, package)


@contextmanager
def transformer_engine(finder: _StubFinder, version: str | None) -> Iterator[None]:
    """Within the block, Transformer Engine is installed in ``version`` ("none": not at all).

    Megatron-Core caches the version it finds; the cache is dropped on both ends.
    """
    from megatron.core import utils

    utils._te_version = None
    if version == NO_TE:
        gone = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_te(name)}
        finder.hidden = frozenset(TE_PACKAGES)
        try:
            yield
        finally:
            finder.hidden = frozenset()
            sys.modules.update(gone)
            utils._te_version = None
        return
    import transformer_engine as installed

    installed.__version__ = version or DEFAULT_TE_VERSION
    try:
        yield
    finally:
        installed.__version__ = DEFAULT_TE_VERSION
        utils._te_version = None


def _is_te(name: str) -> bool:
    return name.split(".")[0] in TE_PACKAGES


class Gpu:
    """Answers ``torch.cuda`` questions about the GPU of the current candidate."""

    def __init__(self) -> None:
        self.name = DEFAULT_GPU

    def install(self) -> None:
        import torch

        def properties(device: Any = None) -> types.SimpleNamespace:
            major, minor = CAPABILITY[self.name]
            return types.SimpleNamespace(
                major=major,
                minor=minor,
                name=DEVICE_NAME[self.name],
                total_memory=80 << 30,
                multi_processor_count=132,
            )

        torch.cuda.get_device_capability = lambda device=None: CAPABILITY[self.name]
        torch.cuda.get_device_properties = properties
        torch.cuda.get_device_name = lambda device=None: DEVICE_NAME[self.name]
        torch.cuda.current_device = lambda: 0
        torch.cuda.synchronize = lambda device=None: None
