"""Actors of ended trials wait for the next ones, in Ray Tune's own cache."""

from types import SimpleNamespace


def test_every_actor_is_kept_although_no_trial_waits_for_one():
    from ray.tune.schedulers.trial_scheduler import FIFOScheduler
    from ray.tune.utils.object_cache import _ObjectCache

    from tuner.cluster.kept_actors import KeepActors

    def kept(scheduler):
        cache = _ObjectCache(may_keep_one=True)
        controller = SimpleNamespace(_actor_cache=cache)
        for _ in range(3):
            scheduler.on_trial_add(controller, SimpleNamespace(placement_group_factory="one"))
            cache.cache_object("one", object())
        list(cache.flush_cached_objects())
        return cache.num_cached_objects

    assert kept(KeepActors()) == 3
    assert kept(FIFOScheduler()) == 1


def test_the_cache_is_where_the_scheduler_looks_for_it():
    import inspect

    from ray.tune.execution.tune_controller import TrialRunnerWrapper, TuneController

    assert "self._actor_cache = _ObjectCache" in inspect.getsource(TuneController.__init__)
    assert "self._tune_controller = " in inspect.getsource(TrialRunnerWrapper.__init__)
