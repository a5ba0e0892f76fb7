"""Samplers by name: the tuner's own, and Optuna's behind the same checker."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tuner.errors import EnvironmentLacksError, InputError, nearest_name

if TYPE_CHECKING:
    import optuna
    from optuna.samplers import BaseSampler

RESIDUAL = "residual"
"""The tuner's own: estimates as prior mean, corrected by measurements (`engine`)."""

_STARTUP_TRIALS = 6


def sampler_names() -> tuple[str, ...]:
    """Every name `search.sampler` may have; the tuner's own first."""
    return (RESIDUAL, *sorted(_SAMPLERS))


def make_sampler(name: str, seed: int) -> BaseSampler:
    """Optuna's sampler of this name; for the tuner's own, the one that draws where it cannot.

    Raises InputError for an unknown name, EnvironmentLacksError where a package is missing.
    """
    import optuna

    if name != RESIDUAL and name not in _SAMPLERS:
        hint = nearest_name(name, sampler_names())
        known = ", ".join(sampler_names())
        raise InputError(
            f"there is no sampler '{name}'", field="search.sampler", fix=hint or f"use {known}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return _SAMPLERS.get(name, _random)(optuna.samplers, seed)


def draws_numbers(name: str) -> bool:
    """Whether a sampler models ordered numbers only, so that sizes are offered as such."""
    return name in ("cmaes", "qmc")


class NumberedChooser:
    """Offers each list of choices to an Optuna trial as a whole number: the place in the list."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def suggest_categorical(self, name: str, choices: Sequence[str]) -> str:
        return choices[self._trial.suggest_int(numbered(name), 0, len(choices) - 1)]


def numbered(field: str) -> str:
    """The parameter that holds the place of a field's value in its list."""
    return f"{field}#"


def _random(samplers: Any, seed: int) -> BaseSampler:
    sampler: BaseSampler = samplers.RandomSampler(seed=seed)
    return sampler


def _tpe(samplers: Any, seed: int) -> BaseSampler:
    sampler: BaseSampler = samplers.TPESampler(
        seed=seed, n_startup_trials=_STARTUP_TRIALS, group=True
    )
    return sampler


def _gp(samplers: Any, seed: int) -> BaseSampler:
    sampler: BaseSampler = samplers.GPSampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
    return sampler


def _nsga2(samplers: Any, seed: int) -> BaseSampler:
    sampler: BaseSampler = samplers.NSGAIISampler(seed=seed, population_size=20)
    return sampler


def _nsga3(samplers: Any, seed: int) -> BaseSampler:
    sampler: BaseSampler = samplers.NSGAIIISampler(seed=seed, population_size=20)
    return sampler


def _cmaes(samplers: Any, seed: int) -> BaseSampler:
    import importlib.util

    if importlib.util.find_spec("cmaes") is None:
        raise EnvironmentLacksError("the sampler cmaes needs a package: pip install cmaes")
    sampler: BaseSampler = samplers.CmaEsSampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
    return sampler


def _qmc(samplers: Any, seed: int) -> BaseSampler:
    sampler: BaseSampler = samplers.QMCSampler(seed=seed, scramble=True)
    return sampler


_SAMPLERS: dict[str, Callable[[Any, int], BaseSampler]] = {
    "random": _random,
    "tpe": _tpe,
    "gp": _gp,
    "nsga2": _nsga2,
    "nsga3": _nsga3,
    "cmaes": _cmaes,
    "qmc": _qmc,
}
