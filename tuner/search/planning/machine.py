"""The machine a job runs on, as estimates need it: a GPU's data, or this CPU measured once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.candidate import Candidate
from tuner.errors import EnvironmentLacksError, InputError
from tuner.search.planning.workplace import Workplace

if TYPE_CHECKING:
    from tuner.cluster.prepared import PreparedJob
    from tuner.timing.calibration import Calibration

_GIB = 2**30
_QUICK = 0.25  # of the time a calibration on request takes; ranks candidates, no more


def workplace_of(
    prepared: PreparedJob, calibration: Calibration | None = None, *, where: str = ""
) -> Workplace:
    """What a job's space is estimated for; by default with what is known of its machine beforehand.

    Raises what `calibration_of` raises.
    """
    from tuner.hardware import get_gpu

    job = prepared.job
    cluster, workload = job.cluster, job.workload
    calibration = calibration or calibration_of(prepared, where=where)
    cores = None
    if cluster.device == "cpu":
        from tuner.timing.microbench_ranks import cores as count_cores

        cores = count_cores()
    gpu = calibration.measured_device() or get_gpu(calibration.gpu)
    limit = cluster.memory_limit_gib
    return Workplace(
        model=prepared.model,
        gpu=gpu,
        gpus_per_node=cluster.gpus_per_node,
        world_size=cluster.world_size,
        seq_length=workload.seq_length,
        global_batch_size=workload.global_batch_size,
        precision=workload.precision,
        rates=calibration.rates,
        cores=cores,
        limit_bytes=None if limit is None else limit * _GIB,
        frontend=prepared.checker.frontend,
    )


def calibration_of(prepared: PreparedJob, *, where: str = "") -> Calibration:
    """What is known of a job's machine before it ran: measured here, or packaged.

    Raises InputError where the job runs on GPUs and names none, EnvironmentLacksError where the CPU
    cannot be measured.
    """
    from tuner.timing.shipped import precision_key, shipped_calibration

    cluster = prepared.job.cluster
    if cluster.device == "cpu":
        return this_cpu()
    if cluster.gpu is None:
        raise InputError(
            "estimates need a GPU type", where=where, field="cluster.gpu", fix="name one, e.g. h100"
        )
    fixed = Candidate.from_flat(prepared.space.fixed)
    precision = precision_key(fixed, prepared.job.workload.precision)
    return shipped_calibration(cluster.gpu, precision)


def this_cpu() -> Calibration:
    """The calibration of this machine's CPU: read from the cache, or measured now and kept.

    Raises EnvironmentLacksError where measuring fails, as on a machine under heavy load.
    """
    from tuner.memory.composition.measure import cache_folder
    from tuner.timing.calibration import Calibration
    from tuner.timing.measure import measure_machine

    path = cache_folder() / "this-cpu.json"
    if path.exists():
        try:
            return Calibration.load(path)
        except InputError:
            path.unlink()  # of an older format
    try:
        calibration = measure_machine("cpu", scale=_QUICK).calibration
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise EnvironmentLacksError(f"this CPU could not be measured: {reason}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    calibration.save(path)
    return calibration
