"""The proposal engine of a job: its candidates, their estimates, and what trials cost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from tuner.candidate import Candidate
from tuner.cluster.prepared import PreparedJob
from tuner.errors import EnvironmentLacksError, InputError
from tuner.models import model_flops_per_step
from tuner.search.acquisition import Goal
from tuner.search.engine import Engine, TrialCosts
from tuner.search.estimates import no_estimates
from tuner.search.samplers import RESIDUAL

if TYPE_CHECKING:
    from tuner.cluster.learning import StudyRates
    from tuner.search.planning.prior import ComposedEstimator
    from tuner.search.records import TrialRecord

    Learning = tuple[StudyRates, ComposedEstimator]

_POOL = 4_000  # candidates proposals choose among; a larger space is planned first
START_S = 45.0  # of a trial: processes, weights, communicators
_log = logging.getLogger(__name__)


class Proposals:
    """What proposes a job's trials: its `engine`, None where an Optuna sampler does.

    With estimates, `learn` refines them by the trials that have completed.
    """

    def __init__(self, engine: Engine | None, learning: Learning | None = None) -> None:
        self.engine, self._learning = engine, learning

    def learn(self, records: Sequence[TrialRecord]) -> None:
        """Refine the machine's rates, and estimate anew, after trials."""
        if self.engine is None or self._learning is None:
            return
        rates, estimator = self._learning
        if rates.learn(records):
            estimator.sustain(rates.calibration.rates)
            self.engine.reestimate(estimator)

    @property
    def calibration(self) -> Path | None:
        """The file of what the study has learned, once there is one."""
        path = None if self._learning is None else self._learning[0].path
        return path if path is not None and path.exists() else None


def proposals_of(prepared: PreparedJob, folder: Path) -> Proposals:
    """What proposes the trials of a job whose study is in `folder`.

    A space of up to some thousand valid candidates is proposed from whole, of a larger one the best
    by plan. Where estimates cannot be had the reason is logged, and proposals start without them.
    """
    job = prepared.job
    if job.search.sampler != RESIDUAL:
        return Proposals(None)
    costs = TrialCosts(
        prepared.world_size_of,
        START_S,
        job.trainable.warmup_steps + job.trainable.measure_steps,
    )
    try:
        return _estimated(prepared, costs, folder)
    except (InputError, EnvironmentLacksError) as error:
        _log.warning("proposals start without estimates: %s", error)
    limit = job.cluster.memory_limit_gib
    limit_bytes = float("inf") if limit is None else limit * 2**30
    engine = Engine(
        _listed(prepared),
        no_estimates,
        limit_bytes=limit_bytes,
        costs=costs,
        goal=goal_of(prepared),
    )
    return Proposals(engine)


def goal_of(prepared: PreparedJob) -> Goal:
    """What the job searches for, the figure to reach as GPU-seconds of a step."""
    objective, workload = prepared.job.objective, prepared.job.workload
    if objective.at_least is None:
        return Goal(objective.goal)
    tokens = workload.seq_length * workload.global_batch_size
    flops = model_flops_per_step(prepared.model, workload.seq_length, workload.global_batch_size)
    cluster = prepared.job.cluster
    per_step = {
        "tflops_per_gpu": flops / 1e12,
        "tokens_per_s_per_gpu": float(tokens),
        "tokens_per_dollar": tokens * 3600 / (cluster.price_per_gpu_hour or 1.0),
        "tokens_per_joule": tokens / (cluster.power_w_per_gpu or 1.0),
    }
    return Goal(objective.goal, per_step[objective.maximize] / objective.at_least)


def _estimated(prepared: PreparedJob, costs: TrialCosts, folder: Path) -> Proposals:
    from tuner.cluster.learning import StudyRates
    from tuner.search.planning.machine import calibration_of, workplace_of
    from tuner.search.planning.plan import plan_space
    from tuner.search.planning.prior import ComposedEstimator

    rates = StudyRates(prepared, calibration_of(prepared), folder)
    place = workplace_of(prepared, rates.calibration)
    estimator = ComposedEstimator(place)
    if prepared.space.combinations() <= _POOL:
        candidates = _listed(prepared)
    else:
        plan = plan_space(prepared.space, prepared.checker, place, prepared.requirements)
        ends = (*plan.best[:_POOL], *plan.pareto)
        candidates = list({one.candidate.key: one.candidate for one in ends}.values())
    limit = max(place.allocatable_bytes(candidate) for candidate in candidates)
    engine = Engine(
        candidates,
        estimator,
        limit_bytes=limit - prepared.requirements.min_free_bytes,
        costs=costs,
        estimates=estimator(candidates),
        goal=goal_of(prepared),
    )
    return Proposals(engine, (rates, estimator))


def _listed(prepared: PreparedJob) -> list[Candidate]:
    """Valid candidates of the space, at random where there are more than some thousand."""
    points = prepared.space.points(_POOL, Random(prepared.job.search.seed))
    distinct = {c.key: c for c in map(Candidate.from_flat, points)}
    return [distinct[key] for key in sorted(distinct) if prepared.check(distinct[key]) is None]
