"""Measured steps that rates are fitted to: published rows and a study's own trials.

`predictor` makes of them what `tuner.timing.fitting` needs: their step times by the model as a
function of the rates. Kernels do not depend on rates, so they are read once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.errors import InputError
from tuner.measurement import RESULT_FILE, SPEC_FILE, Outcome, TrialResult, TrialSpec
from tuner.precision import arithmetic
from tuner.timing.software import age_years

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tuner.hardware import Gpu
    from tuner.timing.calibration import Calibration
    from tuner.timing.fitting import Predict
    from tuner.timing.rates import Rates
    from tuner.timing.step import TimeTable

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Observation:
    """A step that was timed. `document` is what `tuner estimate` takes; `gpu` may be "cpu".

    `age_years` is how much older its software is than the newest (`tuner.timing.software`).
    """

    id: str
    document: Mapping[str, Any]
    step_time_s: float
    age_years: float = 0.0

    @classmethod
    def of_trial(
        cls,
        spec: TrialSpec,
        step_time_s: float,
        *,
        gpu: str = CPU,
        gpus_per_node: int | None = None,
        id: str = "trial",
    ) -> Observation:
        """A trial of a study; `gpu` and `gpus_per_node` are the cluster's."""
        document = {
            "model": dict(spec.model),
            "config": dict(spec.config),
            "world_size": spec.world_size,
            "seq_length": spec.seq_length,
            "global_batch_size": spec.global_batch_size,
            "precision": spec.precision,
            "gpu": gpu,
            "gpus_per_node": gpus_per_node,
        }
        return cls(id, document, step_time_s)

    @property
    def gpu(self) -> str:
        """The name of the GPU."""
        return str(self.document["gpu"])

    @property
    def precision(self) -> str:
        """Arithmetic of the products, as `tuner.precision.arithmetic` names it."""
        return arithmetic(self.document["config"], str(self.document.get("precision", "bf16")))


@dataclass(frozen=True, slots=True)
class Observations:
    """What a file or a study holds, and what of it cannot be used: (id, reason)."""

    usable: tuple[Observation, ...]
    skipped: tuple[tuple[str, str], ...]


def read_observations(path: Path) -> Observations:
    """Steps of a study directory or of rows in the published schema.

    Raises InputError for what is neither.
    """
    if path.is_dir():
        return _of_study(path)
    if not path.exists():
        raise InputError("there is no such file or study", where=str(path))
    return _of_rows(path)


def _of_study(path: Path) -> Observations:
    from tuner.job import load_job
    from tuner.study_dir import open_study_directory

    cluster = load_job(open_study_directory(path).job_path).cluster
    gpu = CPU if cluster.device == "cpu" else cluster.gpu
    if gpu is None:
        raise InputError("names no GPU", where=str(path), field="cluster.gpu", fix="set it")
    usable, skipped = [], []
    for folder in sorted((path / "trials").glob("*")):
        spec, result = folder / SPEC_FILE, folder / RESULT_FILE
        if not (spec.exists() and result.exists()):
            continue
        ended = TrialResult.from_json(json.loads(result.read_text()))
        if ended.outcome is not Outcome.COMPLETED or ended.measurement is None:
            skipped.append((folder.name, f"ended as {ended.outcome}"))
            continue
        usable.append(
            Observation.of_trial(
                TrialSpec.from_json(json.loads(spec.read_text())),
                ended.measurement.step_time_s,
                gpu=gpu,
                gpus_per_node=cluster.gpus_per_node,
                id=folder.name,
            )
        )
    return Observations(tuple(usable), tuple(skipped))


def _of_rows(path: Path) -> Observations:
    from tuner.validation.published import read_rows

    usable, skipped = [], []
    for row in read_rows(path):
        try:
            usable.append(observation_of(row))
        except InputError as error:
            skipped.append((row["id"], str(error)))
    return Observations(tuple(usable), tuple(skipped))


def observation_of(row: Mapping[str, Any]) -> Observation:
    """A published row as a timed step; runs on other frameworks as if on Megatron-Core.

    Raises InputError with the reason where its configuration or its time is not known.
    """
    from tuner.validation.conversion import launch_of
    from tuner.validation.launch import UnmodelledError

    try:
        launch = launch_of(row)
    except UnmodelledError as error:
        raise InputError(str(error)) from None
    document = launch.to_json()
    if launch.link_domain_gpus:
        document["link_domain_gpus"] = launch.link_domain_gpus
    if (row.get("dispatcher") or {}).get("force_load_balancing"):
        document["config"] = document["config"] | {"moe_router_force_load_balancing": True}
    seconds = step_time_of(row) or _time_of_rate(row, document)
    if seconds is None:
        raise InputError("no step time, token rate or FLOP rate is published")
    age = age_years(str(row.get("source_version")))
    return Observation(row["id"], document, seconds, age)


def _time_of_rate(row: Mapping[str, Any], document: Mapping[str, Any]) -> float | None:
    """Seconds of a step that a published rate of model FLOPs means."""
    from tuner.models import ModelSpec, model_flops_per_step

    rate = row["measured"].get("tflops_per_gpu")
    if not rate:
        return None
    work = model_flops_per_step(
        ModelSpec.from_flat(document["model"]),
        document["seq_length"],
        document["global_batch_size"],
        tensor_model_parallel_size=document["config"].get("tensor_model_parallel_size", 1),
    )
    return float(work / (rate * 1e12 * document["world_size"]))


def step_time_of(row: Mapping[str, Any]) -> float | None:
    """Seconds of a step that a published row states, or that its token rate means."""
    measured = row["measured"]
    if measured.get("step_time_ms"):
        return float(measured["step_time_ms"]) * 1e-3
    rate, sizes = measured.get("tokens_per_s_per_gpu"), ("gbs", "seq_length", "num_gpus")
    if rate and all(row.get(name) for name in sizes):
        return float(row["gbs"] * row["seq_length"] / (rate * row["num_gpus"]))
    return None


def predictor(observations: Sequence[Observation], calibration: Calibration) -> Predict:
    """Step times of observations as a function of the rates, `[observation]`.

    The calibration's device stands in for GPUs that no data sheet describes. Raises
    UnsupportedError or InputError, naming the observation, for steps that the model cannot time.
    """
    places: dict[str, int] = {}
    cases: list[TimedCase] = []
    for one in observations:  # equal configurations are timed once
        key = json.dumps(dict(one.document), sort_keys=True, default=str)
        if key not in places:
            places[key] = len(cases)
            cases.append(_named_case(one, calibration))
    place = [
        places[json.dumps(dict(one.document), sort_keys=True, default=str)] for one in observations
    ]
    groups: dict[Any, list[int]] = {}
    for index, case in enumerate(cases):
        groups.setdefault(case.shared, []).append(index)

    ages = np.array([one.age_years for one in observations])

    def predict(rates: Rates) -> NDArray[np.float64]:
        seconds = np.zeros(len(cases))
        for indices in groups.values():
            seconds[indices] = _step_seconds([cases[i] for i in indices], rates)
        older: NDArray[np.float64] = rates.older_software**ages
        return seconds[place] * older

    return predict


@dataclass(frozen=True, slots=True)
class TimedCase:
    """A configuration made ready: its candidate, its machine, the kernels of its units and the
    activations that it offloads."""

    candidate: Any
    model: Any
    gpu: Gpu
    links: Any
    world_size: int
    global_batch_size: int
    kernels: Any
    plain_kernels: Any
    moved: Any
    plain_moved: Any
    cores: int | None

    @property
    def shared(self) -> Any:
        """Cases with equal values are timed together."""
        model = json.dumps(self.model.to_flat(), sort_keys=True, default=str)
        return model, self.gpu.name, self.links, self.world_size, self.global_batch_size

    def table(self, rates: Rates) -> TimeTable:
        """An empty table of unit times under these rates."""
        from tuner.timing.passes import Machine
        from tuner.timing.step import TimeTable

        machine = Machine(self.gpu, self.links, rates, self.world_size, self.cores)
        return TimeTable(self.model, machine)

    def rows(self, table: TimeTable) -> tuple[int, int]:
        """This case's row in a table, and the one of its setting without recompute."""
        return (
            table.row(self.kernels, self.candidate, self.moved),
            table.row(self.plain_kernels, self.candidate, self.plain_moved),
        )


def timed_case(document: Mapping[str, Any], calibration: Calibration | None) -> TimedCase:
    """What `tuner estimate` is asked about, ready to be timed.

    The calibration's device stands in for a CPU; steps on GPUs need none. Raises InputError or
    UnsupportedError.
    """
    from tuner.estimation import EstimateRequest
    from tuner.timing.microbench_ranks import cores
    from tuner.timing.topology import Links

    document = dict(document)
    own = None
    if calibration is not None and document.get("gpu") == CPU:
        own = calibration.measured_device()
    if document.get("gpu") == CPU:
        if own is None:
            raise InputError(
                "the calibration has no figures of a CPU",
                field="device",
                fix="run tuner calibrate measure --device cpu",
            )
        document["gpu"] = "h100"  # the shapes of a request do not depend on it
    domain = document.pop("link_domain_gpus", None)
    request = EstimateRequest.from_document(document)
    gpu = own or request.gpu
    return TimedCase(
        candidate=request.candidate,
        model=request.model,
        gpu=gpu,
        links=Links.of(gpu, gpus_per_node=request.gpus_per_node, link_domain_gpus=domain),
        world_size=request.world_size,
        global_batch_size=request.global_batch_size,
        kernels=_kernels(request, request.candidate, local=own is not None),
        plain_kernels=_kernels(request, _without_recompute(request), local=own is not None),
        moved=_moved(request, request.candidate),
        plain_moved=_moved(request, _without_recompute(request)),
        cores=None if own is None else cores(),
    )


def _named_case(observation: Observation, calibration: Calibration) -> TimedCase:
    try:
        return timed_case(observation.document, calibration)
    except InputError as error:
        raise error.at(observation.id) from None


def _without_recompute(request: Any) -> Any:
    from tuner.memory.composition.measure import without_recompute

    candidate = request.candidate
    return without_recompute(candidate) if candidate.recompute_method == "block" else candidate


def _kernels(request: Any, candidate: Any, *, local: bool) -> Any:
    from tuner.timing.units import model_kernels

    options = {"layers": "local"} if local else {"architecture": request.gpu.architecture}
    return model_kernels(
        request.model,
        candidate,
        seq_length=request.seq_length,
        precision=request.precision,
        **options,
    )


def _moved(request: Any, candidate: Any) -> Any:
    from tuner.timing.offload import activation_traffic

    return activation_traffic(
        request.model,
        candidate,
        seq_length=request.seq_length,
        precision=request.precision,
        architecture=request.gpu.architecture,
    )


def _step_seconds(cases: Sequence[TimedCase], rates: Rates) -> NDArray[np.float64]:
    from tuner.timing.step import step_times

    table = cases[0].table(rates)
    rows = [case.rows(table) for case in cases]
    return step_times(
        [case.candidate for case in cases],
        [own for own, _ in rows],
        [plain for _, plain in rows],
        table,
        global_batch_size=cases[0].global_batch_size,
    ).step_s
