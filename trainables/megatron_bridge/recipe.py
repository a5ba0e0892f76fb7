"""Finding a recipe by name, and the environment it asks for.

Recipes are functions that give a `ConfigContainer`. Those of `megatron.bridge.recipes` exist in
every release; 0.6 adds `megatron.bridge.perf_recipes`, which carry a process environment
(`ConfigContainer.env_vars`) and take precedence, as in upstream's `run_recipe.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainables.errors import TrialSpecError
from tuner.errors import nearest_name

_LIBRARY = "megatron.bridge.recipes"
_BENCHMARKS = "megatron.bridge.perf_recipes"
_LAUNCHER_DEFAULTS = ("CUDA_DEVICE_MAX_CONNECTIONS",)
"""Variables the launcher sets for every rank; a recipe that names one knows better."""


def load_recipe(name: str) -> Any:  # a ConfigContainer
    """The container of a recipe called `name`, or of `package.module:function`.

    Raises TrialSpecError where there is no such recipe.
    """
    recipe = find_recipe(name)
    if recipe is None:
        known = sorted(_names_at(_LIBRARY))
        hint = nearest_name(name.rpartition(":")[2], known) or f"e.g. {', '.join(known[:3])}"
        raise TrialSpecError(f"Megatron Bridge has no recipe {name!r} ({hint})")
    return recipe()


def find_recipe(name: str) -> Callable[..., Any] | None:
    """The function of a recipe, or None. Raises TrialSpecError for a module that is not there."""
    module, separator, function = name.partition(":")
    if separator:
        try:
            found = getattr(importlib.import_module(module), function, None)
        except ModuleNotFoundError as error:
            raise TrialSpecError(f"recipe {name!r}: {error}") from None
        return found if callable(found) else None
    for module_name in (_defining_module(_BENCHMARKS, name), _LIBRARY):
        found = getattr(_imported(module_name), name, None) if module_name else None
        if callable(found):
            return found  # type: ignore[no-any-return]
    inner = _defining_module(_LIBRARY, name)
    return None if inner is None else getattr(importlib.import_module(inner), name)


def _defining_module(package: str, recipe: str) -> str | None:
    """The module of a package whose text defines the function.

    Recipes are looked up by text: importing every model family takes long, and some need packages
    of their own.
    """
    parent = _imported(package)
    for folder in getattr(parent, "__path__", ()):
        for file in sorted(Path(folder).rglob("*.py")):
            if f"def {recipe}(" in file.read_text(encoding="utf-8", errors="replace"):
                inner = file.relative_to(folder).with_suffix("").parts
                return ".".join((package, *(part for part in inner if part != "__init__")))
    return None


def _imported(name: str) -> Any:
    """The module, or None where this release has none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _names_at(package: str) -> set[str]:
    module = _imported(package)
    return {name for name in dir(module) if name.endswith("_config") and not name.startswith("_")}


def missing_environment(
    container: Any, chosen: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Variables of a recipe that this process does not have yet.

    What the process was given stays (upstream's `apply_environment_variables` does the same), and
    so does what the trial chose; raises TrialSpecError for a variable that is no name.
    """
    missing: dict[str, str] = {}
    for name, value in (getattr(container, "env_vars", None) or {}).items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in f"{name}{value}":
            raise TrialSpecError(f"the recipe's environment names {name!r}, which is no variable")
        given = name in environ and name not in _LAUNCHER_DEFAULTS
        if not given and name not in chosen and environ.get(name) != str(value):
            missing[name] = str(value)
    return missing
