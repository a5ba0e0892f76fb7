"""The proposal engine of a job: its candidates, their estimates, and what trials cost."""

from __future__ import annotations

import logging
from random import Random

from tuner.candidate import Candidate
from tuner.cluster.prepared import PreparedJob
from tuner.errors import EnvironmentLacksError, InputError
from tuner.search.engine import Engine, TrialCosts
from tuner.search.estimates import no_estimates
from tuner.search.samplers import RESIDUAL

_POOL = 4_000  # candidates proposals choose among; a larger space is planned first
_START_S = 45.0  # of a trial: processes, weights, communicators
_log = logging.getLogger(__name__)


def engine_of(prepared: PreparedJob) -> Engine | None:
    """What proposes the job's trials; None where an Optuna sampler does.

    A space of up to some thousand valid candidates is proposed from whole, of a larger one the best
    by plan. Where estimates cannot be had the reason is logged, and proposals start without them.
    """
    job = prepared.job
    if job.search.sampler != RESIDUAL:
        return None
    costs = TrialCosts(
        prepared.world_size_of,
        _START_S,
        job.trainable.warmup_steps + job.trainable.measure_steps,
    )
    try:
        return _estimated(prepared, costs)
    except (InputError, EnvironmentLacksError) as error:
        _log.warning("proposals start without estimates: %s", error)
    limit = job.cluster.memory_limit_gib
    limit_bytes = float("inf") if limit is None else limit * 2**30
    return Engine(_listed(prepared), no_estimates, limit_bytes=limit_bytes, costs=costs)


def _estimated(prepared: PreparedJob, costs: TrialCosts) -> Engine:
    from tuner.search.planning.machine import workplace_of
    from tuner.search.planning.plan import plan_space
    from tuner.search.planning.prior import ComposedEstimator

    place = workplace_of(prepared)
    estimator = ComposedEstimator(place)
    if prepared.space.combinations() <= _POOL:
        candidates = _listed(prepared)
    else:
        plan = plan_space(prepared.space, prepared.checker, place, prepared.requirements)
        ends = (*plan.best[:_POOL], *plan.pareto)
        candidates = list({one.candidate.key: one.candidate for one in ends}.values())
    limit = max(place.allocatable_bytes(candidate) for candidate in candidates)
    return Engine(
        candidates,
        estimator,
        limit_bytes=limit - prepared.requirements.min_free_bytes,
        costs=costs,
        estimates=estimator(candidates),
    )


def _listed(prepared: PreparedJob) -> list[Candidate]:
    """Valid candidates of the space, at random where there are more than some thousand."""
    points = prepared.space.points(_POOL, Random(prepared.job.search.seed))
    distinct = {c.key: c for c in map(Candidate.from_flat, points)}
    return [distinct[key] for key in sorted(distinct) if prepared.check(distinct[key]) is None]
