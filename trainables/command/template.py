"""Launch commands with placeholders: a list of arguments in, a list of arguments out.

No shell is involved: a value is always part of one argument, whatever characters it holds. Only
the placeholders of `EXPANDING`, which must be an argument of their own, become several.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.candidate import DEFAULTS, Candidate
from tuner.errors import nearest_name
from tuner.measurement import TrialSpec

EXPANDING = {"megatron_args": "megatron-args", "bridge_overrides": "bridge-cli"}
"""Placeholders that become all options of the candidate, by the export format that writes them."""

FACTS = (
    *("world_size", "nnodes", "node_rank", "ranks_per_node", "rank", "local_rank"),
    *("master_addr", "master_port", "seq_length", "global_batch_size", "data_parallel_size"),
    *("num_microbatches", "steps", "warmup_steps", "measure_steps", "seed", "precision"),
    *("output_dir", "python"),
)
"""Placeholders besides Megatron's fields: where the trial runs and what it is asked for."""

_TOKEN = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)(?:\|([^{}]*))?\}|[{}]")


class TemplateError(ValueError):
    """A template that cannot be used; the message names the argument and the way out."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where one process of the trial runs; `ranks_per_node` are those of the whole command."""

    nnodes: int
    node_rank: int
    ranks_per_node: int
    rank: int
    local_rank: int
    master_addr: str
    master_port: int
    output_dir: str
    python: str


def placeholders(argument: str) -> list[str]:
    """Names that an argument refers to. Raises TemplateError for one that cannot be read."""
    names = []
    for match in _TOKEN.finditer(argument):
        if match[0] in "{}":
            raise TemplateError(
                f"{argument!r} has a single brace; write {{NAME}}, or double it to mean itself"
            )
        if match[1]:
            names.append(match[1])
    for name in names:
        if name in EXPANDING and argument != f"{{{name}}}":
            raise TemplateError(f"{{{name}}} must be an argument of its own")
    return names


def check_names(launch: Iterable[str], fields: Iterable[str]) -> None:
    """Raise TemplateError for a placeholder that is neither a fact nor one of `fields`."""
    known = {*FACTS, *EXPANDING, *DEFAULTS, *fields}
    for argument in launch:
        for name in placeholders(argument):
            if name not in known:
                hint = nearest_name(name, known) or f"facts of a trial: {', '.join(FACTS)}"
                raise TemplateError(f"there is no placeholder {{{name}}} ({hint})")


def expand(launch: Sequence[str], spec: TrialSpec, site: Site) -> list[str]:
    """The command of one process. Raises TemplateError for unknown names and unset values."""
    values = _values(spec, site)
    command: list[str] = []
    for argument in launch:
        names = placeholders(argument)
        if len(names) == 1 and names[0] in EXPANDING:
            command += _options(EXPANDING[names[0]], spec)
        else:
            command.append(_TOKEN.sub(lambda match: _text(match, values), argument))
    return command


def _values(spec: TrialSpec, site: Site) -> dict[str, Any]:
    flat = {**dict(DEFAULTS), **Candidate.from_flat(spec.config).to_flat()}
    candidate = Candidate.from_flat(spec.config)
    data_parallel = max(1, spec.world_size // candidate.model_parallel_size())
    sequences = data_parallel * candidate.micro_batch_size
    return {
        **spec.model,
        **flat,
        **{name: getattr(site, name) for name in Site.__slots__},
        "world_size": spec.world_size,
        "seq_length": spec.seq_length,
        "global_batch_size": spec.global_batch_size,
        "data_parallel_size": data_parallel,
        "num_microbatches": -(-spec.global_batch_size // sequences),
        "steps": spec.warmup_steps + spec.measure_steps,
        "warmup_steps": spec.warmup_steps,
        "measure_steps": spec.measure_steps,
        "seed": spec.seed,
        "precision": spec.precision,
    }


def _text(match: re.Match[str], values: Mapping[str, Any]) -> str:
    if not match[1]:
        return match[0][0]
    if match[1] not in values:
        raise TemplateError(f"there is no placeholder {{{match[1]}}} for this candidate")
    value = values[match[1]]
    if value is None:
        if match[2] is None:
            raise TemplateError(
                f"{{{match[1]}}} is unset for this candidate; write {{{match[1]}|TEXT}}"
            )
        return match[2]
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(str(item) for item in value)
    return str(value)


def _options(form: str, spec: TrialSpec) -> Sequence[str]:
    from tuner.configuration import mcore_version
    from tuner.formats import export_document

    document = {
        "model": {k: v for k, v in spec.model.items() if v is not None},
        "config": dict(spec.config),
        "world_size": spec.world_size,
        "seq_length": spec.seq_length,
        "global_batch_size": spec.global_batch_size,
        "precision": spec.precision,
    }
    return export_document(document, form, mcore=mcore_version()).arguments
