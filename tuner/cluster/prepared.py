"""A job made ready to run: whatever can be wrong is found here, before anything is written."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.candidate import Candidate
from tuner.cluster.placement import Placement, place
from tuner.configuration import PRECISION_FIELDS, resolve_model, rule_fields
from tuner.errors import EnvironmentLacksError, InputError
from tuner.job import Job
from tuner.measurement import TrialSpec
from tuner.models import ModelSpec
from tuner.search.layouts import with_layouts
from tuner.search.records import Rejection
from tuner.search.requirements import Requirements
from tuner.search.space import SearchSpace
from tuner.search.tailoring import for_frontend, for_model
from tuner.search.validity import ValidityChecker, why_nothing_is_valid

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job with its model, space and rules resolved."""

    job: Job
    model: ModelSpec
    space: SearchSpace
    checker: ValidityChecker

    @property
    def requirements(self) -> Requirements:
        """What the job asks of every candidate besides validity."""
        require = self.job.require
        return Requirements(
            require.min_free_gib * _GIB, require.min_data_parallel_size, require.forbid
        )

    def check(self, candidate: Candidate) -> Rejection | None:
        """Why a candidate may not run: a rule it breaks, a requirement of the job, no place."""
        world_size = self.world_size_of(candidate)
        rejection = self.checker(candidate) or self.requirements.rejection(candidate, world_size)
        if rejection is not None:
            return rejection
        try:
            self.placement_of(candidate)
        except InputError as error:
            return Rejection("placement", error.message)
        return None

    def world_size_of(self, candidate: Candidate) -> int:
        """Ranks of the candidate's trial: its own `world_size` axis, else the whole cluster."""
        return int(dict(candidate.extra).get("world_size", self.job.cluster.world_size))

    def spec_of(self, candidate: Candidate) -> TrialSpec:
        """What the trainable is asked to run."""
        cluster, workload, trainable = self.job.cluster, self.job.workload, self.job.trainable
        config = candidate.to_flat()
        config.pop("world_size", None)
        return TrialSpec(
            model=self.model.to_flat(),
            config=config,
            world_size=self.world_size_of(candidate),
            seq_length=workload.seq_length,
            global_batch_size=workload.global_batch_size,
            warmup_steps=trainable.warmup_steps,
            measure_steps=trainable.measure_steps,
            seed=trainable.seed,
            device=cluster.device,
            precision=workload.precision,
            memory_limit_bytes=cluster.memory_limit_bytes,
            timeout_s=trainable.timeout_s,
            options=trainable.options(),
        )

    def placement_of(self, candidate: Candidate) -> Placement:
        """What the candidate's trial asks of the cluster. Raises InputError where it cannot be."""
        cluster = self.job.cluster
        return place(
            self.world_size_of(candidate),
            nodes=cluster.nodes,
            gpus_per_node=cluster.gpus_per_node,
            device=cluster.device,
            domain_gpus=self._domain_gpus(),
            tensor_parallel=candidate.tensor_model_parallel_size,
            expert_parallel=candidate.expert_model_parallel_size
            * (candidate.expert_tensor_parallel_size or 1),
        )

    @property
    def placement_of_all(self) -> Placement | None:
        """The placement of every candidate of the space, None where they differ."""
        if any(axis.field == "world_size" for axis in self.space.axes):
            return None
        return place(
            int(self.space.fixed.get("world_size", self.job.cluster.world_size)),
            nodes=self.job.cluster.nodes,
            gpus_per_node=self.job.cluster.gpus_per_node,
            device=self.job.cluster.device,
        )

    def _domain_gpus(self) -> int | None:
        """GPUs of an NVLink domain: the GPU type's, or a node where the job names none."""
        cluster = self.job.cluster
        if cluster.device == "cpu":
            return None
        if cluster.gpu is None:
            return cluster.gpus_per_node
        from tuner.hardware import get_gpu

        return get_gpu(cluster.gpu).link_domain_gpus


def prepare(job: Job, *, where: str, base_folder: Path, frontend: str | None = None) -> PreparedJob:
    """Resolve and check a job.

    `where` names the job file in errors; `base_folder` resolves paths in it; `frontend` says whose
    rules hold where those are not the trainable's own. Raises InputError
    for a bad model, space, starting candidate or a space without a valid candidate, and
    EnvironmentLacksError where the trainable's packages are missing.
    """
    import trainables

    if job.trainable.name not in trainables.names():
        raise InputError(
            f"there is no trainable '{job.trainable.name}'",
            where=where,
            field="trainable.name",
            fix=f"choose one of {', '.join(trainables.names())}",
        )
    model = _place_errors(lambda: resolve_model(job.model, base_folder), where, "model")
    space = _place_errors(
        lambda: with_layouts(job.search_space(base_folder), model, job.workload.seq_length),
        where,
        "",
    )
    frontend = frontend or trainables.get(job.trainable.name).frontend
    space = for_frontend(space, frontend)
    _check_axes(space, where)
    _check_command(job, space, where)
    mcore = installed_mcore()
    checker = ValidityChecker(
        fixed={
            **rule_fields(model, mcore),
            **PRECISION_FIELDS[job.workload.precision],
            **_device_fields(job),
            "seq_length": job.workload.seq_length,
            "global_batch_size": job.workload.global_batch_size,
        },
        world_size=job.cluster.world_size,
        mcore=mcore,
        frontend=frontend,
    )
    job = _with_plain_start(job, space, mcore, where, base_folder)
    space = for_model(space, model, job.search.start)
    prepared = PreparedJob(job, model, space, checker)
    reason = why_nothing_is_valid(space, checker)
    if reason is not None:
        raise InputError(reason, where=where, field="space", fix="widen the space or the cluster")
    for position, flat in enumerate(job.search.start):
        _check_start(prepared, flat, where, f"search.start[{position}]")
    return prepared


def _check_axes(space: SearchSpace, where: str) -> None:
    """Refuse fields that no Megatron-Core has: every candidate with them would be invalid."""
    from tuner.constraints.fields import catalogue
    from tuner.errors import nearest_name

    known = catalogue()
    for name in (*(axis.field for axis in space.axes), *space.fixed):
        if name not in known and name != "world_size" and not name.startswith("env."):
            hint = nearest_name(name, known) or "see tuner job-schema"
            raise InputError(f"there is no field '{name}'", where=where, field="space", fix=hint)


def _check_command(job: Job, space: SearchSpace, where: str) -> None:
    """Refuse placeholders of a launch command that no trial could fill in."""
    if job.trainable.command is None:
        return
    from trainables.command.template import TemplateError, check_names
    from tuner.constraints.fields import catalogue
    from tuner.models import MODEL_FIELDS

    fields = {*catalogue(), *MODEL_FIELDS, *space.fixed, *(axis.field for axis in space.axes)}
    try:
        check_names(job.trainable.command.launch, fields)
    except TemplateError as error:
        raise InputError(str(error), where=where, field="trainable.command.launch") from None


def _with_plain_start(
    job: Job, space: SearchSpace, mcore: str, where: str, base_folder: Path
) -> Job:
    """The job with starting candidates in other forms (command lines, overrides) made flat."""
    from tuner.formats.reader import starting_fields

    tunable = {axis.field for axis in space.axes} | set(space.fixed)
    start = [
        starting_fields(
            entry,
            tunable=tunable,
            mcore=mcore,
            where=f"{where}: search.start[{position}]",
            base=base_folder,
        )
        for position, entry in enumerate(job.search.start)
    ]
    search = job.search.model_copy(update={"start": start})
    return job.model_copy(update={"search": search})


def installed_mcore() -> str:
    """Version of the installed Megatron-Core, or EnvironmentLacksError."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentLacksError(
            "Megatron-Core is not installed: pip install megatron-core"
        ) from None


def _device_fields(job: Job) -> dict[str, Any]:
    """What the rules must know of the device: CPU ranks have no Transformer Engine."""
    if job.cluster.device == "cpu":
        return {"te_version": "none", "transformer_impl": "local"}
    return {} if job.cluster.gpu is None else {"gpu": job.cluster.gpu}


def _check_start(prepared: PreparedJob, flat: Mapping[str, Any], where: str, field: str) -> None:
    def check() -> None:
        candidate = Candidate.from_flat(flat)
        prepared.space.labels(candidate.to_flat())
        rejection = prepared.check(candidate)
        if rejection is not None:
            raise InputError(f"invalid by rule {rejection.rule}: {rejection.message}")

    _place_errors(check, where, field)


def _place_errors(call: Any, where: str, field: str) -> Any:
    """Call, and give any InputError-like ValueError its place in the job file."""
    try:
        return call()
    except InputError as error:
        raise error.at(where, field) from None
    except ValueError as error:
        raise InputError(str(error), where=where, field=field) from None
