"""Makes profiles by dry runs in parallel, and keeps them on disk under what they depend on."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.memory.composition.kinds import layer_kinds, profile_model
from tuner.memory.composition.profile import StepProfile, read_profile
from tuner.memory.composition.split import SPLIT_FIELDS
from tuner.memory.errors import UnsupportedError
from tuner.memory.request import TRANSFORMER_ENGINE, DryRunRequest
from tuner.memory.trace import Trace
from tuner.models import ModelSpec
from tuner.precision import of_frontend

PIPELINE_FIELDS = (
    *SPLIT_FIELDS,
    "microbatch_group_size_per_vp_stage",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "deallocate_pipeline_outputs",
    "defer_embedding_wgrad_compute",
    "wgrad_deferral_limit",
    "overlap_param_gather_with_optimizer_step",  # splits the optimizer by chunk: a profile has one
    "recompute_num_layers",
    "cpu_offloading_num_layers",
    "cpu_offloading_double_buffering",
    "num_distributed_optimizer_instances",
    "optimizer_offload_fraction",
)
"""Fields that composition accounts for itself: a profile does not depend on them."""

_WHOLE_STEP = "full_iteration"

_PROFILED_FRACTION = 0.0
"""Share of optimizer state on the host while profiling: what stays tells bytes per parameter."""

UNCOMPOSED: Mapping[str, str] = {
    "overlap_moe_expert_parallel_comm": "overlap of expert-parallel communication",
    "use_megatron_fsdp": "Megatron-FSDP",
    "use_torch_fsdp2": "FSDP2",
}
"""Settings whose memory only a full dry run says."""


@dataclass(frozen=True, slots=True)
class ProfileSource:
    """How dry runs are made: precision and GPU architecture of the run, versions beneath it.

    `layers` says whose layers run, as in `DryRunRequest`; `mcore` is a folder with another
    Megatron-Core than the installed one; `frontend` is what sets Megatron-Core up ("mcore",
    "bridge" or "megatron-lm").
    """

    seq_length: int
    precision: str = "bf16"
    architecture: str = "hopper"
    te_version: str = "2.9.0"
    mcore: Path | None = None
    layers: str = TRANSFORMER_ENGINE
    frontend: str = "mcore"


@dataclass(frozen=True, slots=True)
class ProfileTask:
    """One profile to be made: its dry run, its layers, and its shards of optimizer state."""

    request: DryRunRequest
    kinds: tuple[str, ...]
    shards: tuple[float, float]
    mcore: Path | None

    @property
    def key(self) -> str:
        """Name of the profile: equal tasks under equal software have equal names."""
        document = [self.request.to_json(), self.kinds, _versions(self.mcore), _code_version()]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]


def check_composable(candidate: Candidate) -> None:
    """Raise UnsupportedError where only a full dry run of the candidate says what it needs."""
    flat = candidate.to_flat()
    for name, meaning in UNCOMPOSED.items():
        if flat.get(name):
            raise UnsupportedError(
                f"{meaning} is not composed from profiles", field=name, fix="use a full dry run"
            )
    if candidate.cuda_graph_impl not in ("none", _WHOLE_STEP):
        raise UnsupportedError(
            "graphs of layers are not composed from profiles",
            field="cuda_graph_impl",
            fix="use a full dry run",
        )


def profile_task(
    model: ModelSpec, candidate: Candidate, source: ProfileSource, *, recompute: bool = True
) -> ProfileTask:
    """The dry run that profiles `candidate`: one replica, no pipeline, two layers of each kind.

    `recompute=False` takes the candidate's setting without any recompute.
    """
    check_composable(candidate)
    flat = (candidate if recompute else without_recompute(candidate)).to_flat()
    environment = flat.pop("env", {})
    for name in PIPELINE_FIELDS:
        flat.pop(name, None)
    if candidate.cuda_graph_impl == _WHOLE_STEP:  # holds in its pool what an eager step holds
        flat.pop("cuda_graph_impl")
    if flat.get("recompute_granularity") == "full":
        flat |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if flat.get("optimizer_cpu_offload"):
        flat["optimizer_offload_fraction"] = _PROFILED_FRACTION
    architecture, config, kinds = profile_model(model, layer_kinds(model, flat), flat)
    if candidate.pipeline_model_parallel_size > 1:  # tied weights lie on two ranks
        architecture.pop("share_embeddings_and_output_weights", None)
    tensor, context = candidate.tensor_model_parallel_size, candidate.context_parallel_size
    world = profile_world_size(candidate)
    request = DryRunRequest(
        model=architecture,
        config=of_frontend(source.frontend, config),
        world_size=world,
        seq_length=source.seq_length,
        global_batch_size=2 * candidate.micro_batch_size * world // (tensor * context),
        rank=0,
        precision=source.precision,
        architecture=source.architecture,
        te_version=source.te_version,
        layers=source.layers,
        environment={k: v for k, v in environment.items() if k in _ENVIRONMENT},
        boundaries=True,
    )
    return ProfileTask(request, kinds, request.optimizer_shards, source.mcore)


def profile_world_size(candidate: Candidate) -> int:
    """Fewest ranks that hold one replica of the experts and of the rest."""
    dense = candidate.tensor_model_parallel_size * candidate.context_parallel_size
    return math.lcm(dense, _expert_ranks(candidate))


def _expert_ranks(candidate: Candidate) -> int:
    tensor = candidate.expert_tensor_parallel_size or candidate.tensor_model_parallel_size
    return tensor * candidate.expert_model_parallel_size


def without_recompute(candidate: Candidate) -> Candidate:
    """The same candidate keeping everything for backward."""
    return replace(
        candidate,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
        recompute_modules=(),
        distribute_saved_activations=False,
    )


_ENVIRONMENT = ("CUBLAS_WORKSPACE_CONFIG", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
"""Variables that change what is allocated, and not only where."""


def cache_folder() -> Path:
    """Where profiles are kept: `MEGATRON_TUNER_CACHE`, else below the user's cache folder."""
    own = os.environ.get("MEGATRON_TUNER_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(own) if own else Path(base) / "megatron-tuner" / "profiles"


Watcher = Callable[[ProfileTask, Trace, Mapping[str, str]], None]
"""Told the trace of a dry run that a task took, and what the run stated."""


def profiles_of(
    tasks: Sequence[ProfileTask], *, workers: int | None = None, watcher: Watcher | None = None
) -> list[StepProfile | InputError]:
    """The profile of each task, or why it cannot be made.

    Read from disk where it is there, measured otherwise: equal tasks once, `workers` of them at a
    time (by default one for each core), each told to `watcher` from the thread that waited for it.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    keys = [task.key for task in tasks]
    found: dict[str, StepProfile | InputError] = {}
    missing: dict[str, ProfileTask] = {}
    for key, task in zip(keys, tasks, strict=True):
        if key in found or key in missing:
            continue
        path = folder / f"{key}.json"
        if path.exists():
            found[key] = StepProfile.from_json(json.loads(path.read_text()))
        else:
            missing[key] = task
    if missing:
        with ThreadPoolExecutor(max_workers=workers or os.cpu_count() or 1) as pool:
            made = pool.map(lambda key: _measured(folder, key, missing[key], watcher), missing)
            found.update(zip(missing, made, strict=True))
    return [found[key] for key in keys]


def _measured(
    folder: Path, key: str, task: ProfileTask, watcher: Watcher | None
) -> StepProfile | InputError:
    from tuner.measurement import write_json_atomically

    try:
        profile = measure_profile(task, watcher)
    except InputError as error:
        return error
    write_json_atomically(folder / f"{key}.json", profile.to_json())
    return profile


def measure_profile(task: ProfileTask, watcher: Watcher | None = None) -> StepProfile:
    """Make the dry run of a task and read the units off its trace."""
    from tuner.memory.worker_pool import record

    trace, stated = record(task.request, task.mcore)
    if watcher is not None:
        watcher(task, trace, stated)
    return read_profile(trace, task.request, task.kinds, task.shards, stated)


@lru_cache(maxsize=16)
def _versions(mcore: Path | None) -> tuple[str, ...]:
    from importlib import metadata

    return (metadata.version("megatron-core"), metadata.version("torch"), str(mcore or ""))


@lru_cache(maxsize=1)
def _code_version() -> str:
    """A digest of the code that makes dry runs: profiles made by other code are not read."""
    import trainables.megatron_core
    import tuner.memory

    digest = hashlib.sha256()
    for package in (tuner.memory, trainables.megatron_core):
        for path in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
