"""The job that `tuner plan` plans: a job file, or one made from a model or an existing command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.configuration import mcore_version, resolve_model, with_model
from tuner.errors import InputError
from tuner.files import read_text

if TYPE_CHECKING:
    from tuner.candidate import Candidate
    from tuner.estimation import EstimateRequest
    from tuner.job import Job

_LONGEST = 8192
_STEP_TOKENS = 2**22
"""Of a step where nothing says how many: what models of some ten billion parameters start with."""


_VOCABULARY = 2**17
"""Words where nothing says how many: of the size that current tokenizers have."""

_OF_THE_LAYOUT = frozenset(
    (
        *("overlap_p2p_comm", "batch_p2p_comm", "pipeline_model_parallel_layout"),
        *("microbatch_group_size_per_vp_stage", "num_layers_in_first_pipeline_stage"),
        *("num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split"),
        *("account_for_loss_in_pipeline_split", "data_parallel_sharding_strategy"),
    )
)
"""Fields that follow from the layout of a configuration: other layouts have others."""


@dataclass(frozen=True, slots=True)
class Start:
    """A job and the file it came from; `made` where that is no job file, with the `candidate` that
    it holds, if any, the fields that were `assumed`, and the `frontend` that it was written for."""

    job: Job
    file: Path
    made: bool = False
    candidate: Candidate | None = None
    assumed: Mapping[str, Any] = field(default_factory=dict)
    frontend: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What the command line says of a run: it fills in what a file leaves open.

    `started_with` is what a launch script is started with.
    """

    gpu: str | None = None
    gpus: int | None = None
    seq_length: int | None = None
    global_batch_size: int | None = None
    started_with: Sequence[str] = ()


def starting_job(path: Path, run: Run) -> Start:
    """The job at `path`: a job file or the name of a shipped job; else one made from a Hugging
    Face `config.json`, or from a launch script, overrides or configuration as `tuner check` takes.

    Raises InputError naming what is missing.
    """
    from tuner.job import find_job, load_job

    file = find_job(path)
    text = read_text(file)
    if _is_hugging_face(text):
        return Start(_model_job(file, run), file, made=True)
    if file.suffix in (".yaml", ".yml") and _is_job(text):
        return Start(load_job(file), file)
    return _existing(file, run)


def with_vocabulary(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration whose architecture has a vocabulary, and what was assumed for it.

    Launch scripts name a tokenizer instead, which is not read.
    """
    config, model = document.get("config"), document.get("model")
    stated = {**(config if isinstance(config, Mapping) else {}), **_fields(model)}
    if "num_layers" not in stated or stated.get("vocab_size") or stated.get("padded_vocab_size"):
        return dict(document), {}
    assumed = {"vocab_size": _VOCABULARY}
    return {**document, "config": {**dict(config or {}), **assumed}}, assumed


def _fields(model: object) -> Mapping[str, Any]:
    return model if isinstance(model, Mapping) else {}


def _is_hugging_face(text: str) -> bool:
    try:
        document = json.loads(text)
    except ValueError:
        return False
    return isinstance(document, Mapping) and "model_type" in document


def _is_job(text: str) -> bool:
    """Whether a YAML file is meant as a job; one that cannot be read is, so that it is said why."""
    from tuner.files import parse_yaml_mapping

    try:
        document = parse_yaml_mapping(text, where="")
    except InputError:
        return "--" not in text
    return "cluster" in document or "config" not in document


def _model_job(file: Path, run: Run) -> Job:
    model = resolve_model({"hf_config": file.name}, file.parent)
    if run.gpu is None or run.gpus is None:
        raise InputError(
            "a model alone does not say what it runs on",
            where=str(file),
            fix="give --gpu and --gpus, e.g. --gpu h100 --gpus 64",
        )
    longest = min(model.max_position_embeddings or _LONGEST, _LONGEST)
    seq_length = run.seq_length or longest
    rounds = max(1, round(_STEP_TOKENS / seq_length / run.gpus))  # whole ones, whatever the layout
    batch = run.global_batch_size or run.gpus * rounds
    return _job(
        file.resolve().parent.name,
        {"hf_config": file.name},
        run.gpu,
        run.gpus,
        {"seq_length": seq_length, "global_batch_size": batch},
        {"includes": ["dense" if model.num_moe_experts is None else "moe"]},
        str(file),
    )


def _existing(file: Path, run: Run) -> Start:
    from tuner.commands.check import note_misspelt_keys
    from tuner.estimation import EstimateRequest
    from tuner.formats.reader import read_document

    document = read_document(
        file, mcore=mcore_version(), effective=True, started_with=run.started_with
    )
    note_misspelt_keys(document, file)
    given = {
        "gpu": run.gpu,
        "world_size": run.gpus,
        "seq_length": run.seq_length,
        "global_batch_size": run.global_batch_size,
    }
    document = {**document, **{name: v for name, v in given.items() if v is not None}}
    document, assumed = with_vocabulary(document)
    try:
        request = EstimateRequest.from_document(with_model(document, file.parent))
    except InputError as error:
        raise error.at(str(file)) from None
    includes = ["dense" if request.model.num_moe_experts is None else "moe"]
    job = _job(
        file.stem,
        request.model.to_flat(),
        request.gpu.name,
        request.world_size,
        {
            "seq_length": request.seq_length,
            "global_batch_size": request.global_batch_size,
            "precision": "fp32" if request.precision == "fp32" else "bf16",
        },
        {"includes": includes},
        str(file),
    )
    searched = {axis.field for axis in job.search_space(file.parent).axes}
    fixed = {k: v for k, v in request.candidate.extra if k not in searched | _OF_THE_LAYOUT}
    env = {name: v for name, v in request.candidate.env if f"env.{name}" not in searched}
    frontend = document.get("frontend")
    if frontend == "megatron-lm":
        env = {**_connections(request, fixed), **env}
    fixed |= {"env": env} if env else {}
    space = job.space.model_copy(update={"fixed": fixed})
    job = job.model_copy(update={"space": space})
    return Start(job, file, True, request.candidate, assumed, frontend)


def _connections(request: EstimateRequest, fixed: Mapping[str, Any]) -> dict[str, str]:
    """The variable that Megatron-LM wants for tensor parallelism before Blackwell (rule E01)."""
    sharded = fixed.get("use_megatron_fsdp") or fixed.get("use_torch_fsdp2")  # rule D12
    if request.gpu.compute_capability >= (10, 0) or sharded:
        return {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def _job(
    name: str,
    model: Mapping[str, Any],
    gpu: str,
    gpus: int,
    workload: Mapping[str, Any],
    space: Mapping[str, Any],
    where: str,
) -> Job:
    from tuner.hardware import get_gpu
    from tuner.job import parse_job

    per_node = min(gpus, get_gpu(gpu).gpus_per_node)
    if gpus % per_node:
        raise InputError(f"{gpus} GPUs are no whole number of nodes of {per_node}", where=where)
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip("._-")
    return parse_job(
        {
            "name": kept or "plan",
            "model": dict(model),
            "cluster": {"gpu": gpu, "gpus_per_node": per_node, "nodes": gpus // per_node},
            "workload": dict(workload),
            "space": dict(space),
        },
        where=where,
    )
