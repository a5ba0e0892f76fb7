"""The job file: what a user writes to have a training job tuned.

The schema is pydantic because this is the edge where users' files come in; `load_job` turns it
into the plain values the rest of the tuner works with. Every field is documented here, and
`tuner job-schema` prints the same as JSON Schema for editors. Units stand in the field names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tuner.errors import InputError, nearest_name
from tuner.files import read_yaml_mapping
from tuner.job_trainables import Bridge, Command
from tuner.search.space import SearchSpace, parse_space

Positive = Annotated[int, Field(ge=1, le=10**9)]
PositiveSeconds = Annotated[float, Field(gt=0, le=10**9, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cluster(_Section):
    """The machines the trials run on."""

    device: Literal["cpu", "cuda"] = Field(
        "cuda", description="'cuda' for GPUs, 'cpu' for ranks on CPU cores over gloo."
    )
    nodes: Positive = Field(1, description="Number of nodes.")
    gpus_per_node: Positive = Field(
        description="GPUs of one node; with device 'cpu' the ranks one node runs."
    )
    gpu: str | None = Field(None, description="GPU type, e.g. 'h100'; informs the rules.")
    health_check: bool | None = Field(
        None,
        description="Test every node before trials use it (arithmetic, copies, a collective) and "
        "leave out slow or broken ones. Unset: with GPUs, and with several nodes.",
    )
    memory_limit_gib: float | None = Field(
        None,
        gt=0,
        le=10**6,
        allow_inf_nan=False,
        description="Peak allocated memory a rank may reach, in GiB (2^30 bytes). A trial above it "
        "counts as out of memory. Unset: whatever the device has.",
    )

    price_per_gpu_hour: float | None = Field(
        None, gt=0, le=10**6, allow_inf_nan=False, description="Price of a GPU for an hour."
    )
    power_w_per_gpu: float | None = Field(
        None,
        gt=0,
        le=10**6,
        allow_inf_nan=False,
        description="Power drawn per GPU under load, with its share of node and network, in W.",
    )

    @property
    def world_size(self) -> int:
        """GPUs of the whole cluster."""
        return self.nodes * self.gpus_per_node

    @property
    def memory_limit_bytes(self) -> int | None:
        """`memory_limit_gib` in bytes."""
        return None if self.memory_limit_gib is None else int(self.memory_limit_gib * 2**30)


class Workload(_Section):
    """What one training step processes."""

    seq_length: Positive = Field(description="Tokens per sequence.")
    global_batch_size: Positive = Field(description="Sequences per optimizer step.")
    precision: Literal["bf16", "fp32"] = Field("bf16", description="Parameter and compute dtype.")


class Space(_Section):
    """The search space: shipped or own spaces, and changes to them."""

    includes: list[str] = Field(
        default_factory=list,
        description="Shipped spaces by name ('dense', 'moe', 'cpu') or YAML files, in order.",
    )
    axes: dict[str, Any] = Field(
        default_factory=dict,
        description="Field to its values: a list, or {values|subsets, min_modules, max_modules, "
        "when}; null removes an included axis. Any Megatron field may stand here.",
    )
    fixed: dict[str, Any] = Field(
        default_factory=dict, description="Field to the one value every candidate has."
    )


class Objective(_Section):
    """What the best candidate is best at, among those that fit the memory limit."""

    maximize: Literal[
        "tflops_per_gpu", "tokens_per_s_per_gpu", "tokens_per_dollar", "tokens_per_joule"
    ] = Field(
        "tflops_per_gpu",
        description="The figure to maximise; tokens per dollar or joule need the cluster's price "
        "or power.",
    )
    goal: Literal["throughput", "memory", "pareto"] = Field(
        "throughput",
        description="'throughput' maximises the figure, 'memory' minimises peak memory among "
        "candidates that reach `at_least`, 'pareto' looks for the whole trade-off.",
    )
    at_least: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="The figure that goal 'memory' must reach."
    )

    @property
    def measured_figure(self) -> str:
        """The measured figure that grows with `maximize`: price and power are one factor."""
        priced = self.maximize in ("tokens_per_dollar", "tokens_per_joule")
        return "tokens_per_s_per_gpu" if priced else self.maximize


class Require(_Section):
    """What every candidate must keep to besides being valid."""

    min_free_gib: float = Field(
        0.0, ge=0, le=10**6, allow_inf_nan=False, description="Memory a rank must leave free, GiB."
    )
    min_data_parallel_size: Positive = Field(1, description="Data-parallel replicas at least.")
    forbid: dict[str, list[Any]] = Field(
        default_factory=dict, description="Field to values no candidate may have."
    )


class Budget(_Section):
    """When the search ends. Candidates the rules reject cost nothing and count for nothing."""

    trials: Positive = Field(20, description="Trials to launch at most.")
    wall_clock_s: PositiveSeconds | None = Field(
        None, description="No trial starts later than this many seconds after the first."
    )
    gpu_hours: PositiveSeconds | None = Field(
        None, description="No trial starts after trials have taken this many GPU-hours."
    )
    stop_when_unlikely: bool = Field(
        True,
        description="End when a candidate better by 1 % is less than 5 % likely (sampler "
        "'residual', once three trials have completed).",
    )


class Search(_Section):
    """How candidates are proposed."""

    sampler: Literal["residual", "cmaes", "gp", "nsga2", "nsga3", "qmc", "random", "tpe"] = Field(
        "residual",
        description="'residual' corrects the tuner's estimates by measurements; the others are "
        "Optuna's.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Same seed, same proposals.")
    race: bool = Field(
        True,
        description="A trial stops timing steps as soon as they rule out that it beats the best "
        "run so far (goal 'throughput').",
    )
    start: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Flat candidates to try first, e.g. the setting in use today. They must lie in "
        "the space. {megatron_args: TEXT}, {megatron_script: PATH}, {bridge_overrides: LIST} or "
        "{bridge_yaml: PATH} starts from settings in those forms.",
    )


class Trainable(_Section):
    """How a trial is run."""

    name: str = Field("megatron_core", description="Which trainable runs the trials.")
    warmup_steps: int = Field(
        2, ge=1, le=10**4, description="Steps before the timed ones (the first makes Adam's state)."
    )
    measure_steps: int = Field(3, ge=1, le=10**4, description="Timed steps; the median counts.")
    timeout_s: PositiveSeconds = Field(600.0, description="A trial is killed after this long.")
    hang_after_s: PositiveSeconds = Field(
        300.0,
        description="A trial counts as hung after this long without a step (or without a phase of "
        "its start), or after ten times its expected step, whichever is longer.",
    )
    seed: int = Field(1234, ge=0, lt=2**31, description="Seed of weights and mock data.")
    max_concurrent: Positive | None = Field(
        None,
        description="Trials side by side at most; unset: as many as the cluster's resources allow "
        "(with device 'cpu': 1, since trials would share cores).",
    )
    bridge: Bridge | None = Field(None, description="What 'megatron_bridge' runs.")
    command: Command | None = Field(None, description="What 'command' runs.")

    @model_validator(mode="after")
    def _sections_fit_the_name(self) -> Trainable:
        sections = {"megatron_bridge": self.bridge, "command": self.command}
        if self.name in sections and sections[self.name] is None:
            section = "bridge" if self.name == "megatron_bridge" else "command"
            raise ValueError(f"trainable '{self.name}' needs the section `{section}`")
        for name, section_value in sections.items():
            if name != self.name and section_value is not None:
                raise ValueError(f"this section is read by trainable '{name}' only")
        return self

    def options(self) -> dict[str, Any]:
        """What the chosen trainable is told besides the trial itself."""
        section = self.bridge or self.command
        return {} if section is None else section.options()


class Tracking(_Section):
    """Where MLflow records go."""

    uri: str | None = Field(
        None, description="MLflow tracking URI; unset: an SQLite file in the study directory."
    )
    experiment: str = Field(
        "megatron-tuner", min_length=1, max_length=200, description="MLflow experiment name."
    )


class Job(_Section):
    """A tuning job."""

    name: Name = Field(description="Names the study directory and the MLflow parent run.")
    model: str | dict[str, Any] = Field(
        description="A catalogue name ('llama3-70b'), {hf_config: PATH} for a Hugging Face "
        "config.json, or a mapping of Megatron-Core architecture fields (with `base: NAME` to "
        "start from a catalogue model)."
    )
    cluster: Cluster
    workload: Workload
    space: Space
    objective: Objective = Objective()
    require: Require = Require()
    budget: Budget = Budget()
    search: Search = Search()
    trainable: Trainable = Trainable()
    tracking: Tracking = Tracking()

    def search_space(self, base_folder: Path | None = None) -> SearchSpace:
        """The job's resolved space. Raises InputError naming the axis."""
        document = self.space.model_dump()
        return parse_space(document, where="space", base_folder=base_folder)


def load_job(path: Path) -> Job:
    """The job in a YAML file, or one of the shipped jobs by name ("cpu_quickstart").

    Raises InputError naming the file, the field and the nearest valid name.
    """
    path = find_job(path)
    return parse_job(read_yaml_mapping(path), where=str(path))


def find_job(path: Path) -> Path:
    """`path` itself, or the shipped job of that name where no such file exists."""
    import search_spaces

    shipped = Path(search_spaces.__file__).parent / "jobs" / f"{path.name}.yaml"
    if not path.exists() and path.parent == Path() and shipped.is_file():
        return shipped
    return path


def parse_job(document: dict[str, Any], *, where: str) -> Job:
    """The job of a mapping; `where` names its file in errors."""
    try:
        return Job.model_validate(document)
    except ValidationError as error:
        raise _input_error(error, where) from None


def _input_error(error: ValidationError, where: str) -> InputError:
    """The first problem pydantic found as one line; a misspelt key before the missing one."""
    problems = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first = problems[0]
    location = [part for part in first["loc"] if not _is_union_tag(part)]
    path = ".".join(str(part) for part in location)
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])  # never a tag, whatever it looks like
        parents = [part for part in first["loc"][:-1] if not _is_union_tag(part)]
        known = _fields_at(parents)
        parent = ".".join(str(part) for part in parents)
        fix = nearest_name(key, known) or f"known keys: {', '.join(known)}"
        return InputError(f"unknown key '{key}'", where=where, field=parent, fix=fix)
    if first["type"] == "missing":
        return InputError("this field is required", where=where, field=path, fix="add it")
    more = f"; {len(problems) - 1} more problems" if len(problems) > 1 else ""
    value = repr(first.get("input"))
    shown = value if len(value) <= 60 else value[:57] + "..."
    message = first["msg"][0].lower() + first["msg"][1:]
    return InputError(f"{shown}: {message}{more}", where=where, field=path)


def _is_union_tag(part: int | str) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("str", "float", "int"))


def _fields_at(location: list[int | str]) -> list[str]:
    section: type[BaseModel] = Job
    for part in location:
        field = section.model_fields.get(str(part))
        inner = _section_of(field.annotation) if field is not None else None
        if inner is None:
            break
        section = inner
    return list(section.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section an annotation names, also where it may be left out."""
    for option in get_args(annotation) or (annotation,):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def job_schema() -> dict[str, Any]:
    """JSON Schema of the job file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Job.model_json_schema()}
