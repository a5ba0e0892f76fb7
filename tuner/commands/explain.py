"""`tuner explain`: where the memory of one configuration goes, and what each lever would change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.commands.check import DEFAULT_FRONTEND, note_misspelt_keys
from tuner.commands.output import coloured, console, print_json
from tuner.configuration import (
    PRECISION_FIELDS,
    completed,
    mcore_version,
    rule_fields,
    with_model,
)
from tuner.errors import InputError
from tuner.formats.reader import read_document

if TYPE_CHECKING:
    from tuner.estimation import EstimateRequest
    from tuner.search.planning.weighing import Better, Figures, Scales, Weighed

_GIB = 2**30


def run_explain(
    config: Path, run: Mapping[str, Any], started_with: Sequence[str] = (), *, as_json: bool
) -> int:
    """Explain and print; 0 where the configuration is valid and fits, else 1.

    `run` holds what the command line says of the run (GPU, number of GPUs, batch), which fills in
    what the file leaves open.
    """
    document = read_document(
        config, mcore=mcore_version(), effective=True, started_with=started_with
    )
    note_misspelt_keys(document, config)
    answer = explain_document(
        completed(document, run),
        where=str(config),
        base_folder=config.parent,
    )
    if as_json:
        print_json(answer)
    else:
        _print(answer, str(config))
    return 0 if answer["fits"] and answer["valid"] else 1


def explain_document(
    document: Mapping[str, Any], *, where: str, base_folder: Path = Path()
) -> dict[str, Any]:
    """The document of `tuner explain`. Raises InputError naming the field and the file."""
    from tuner.commands.starting import with_vocabulary
    from tuner.estimation import EstimateRequest
    from tuner.memory.worker_pool import DryRunError

    document, assumed = with_vocabulary(document)
    try:
        request = EstimateRequest.from_document(with_model(document, base_folder))
        frontend = str(document.get("frontend") or DEFAULT_FRONTEND)
        return {**_explained(request, frontend), "assumed": assumed}
    except DryRunError as error:
        raise InputError(f"cannot be estimated: {error}", where=where) from None
    except InputError as error:
        raise error.at(where) from None
    except (ValueError, TypeError) as error:
        raise InputError(str(error), where=where) from None


def _explained(request: EstimateRequest, frontend: str) -> dict[str, Any]:
    scales = _scales(request, frontend)
    weighing = scales.weigh(request.candidate)
    own = weighing.figures
    broken = scales.checker.errors(request.candidate)
    better = weighing.better
    return {
        "config": request.candidate.to_flat(),
        "valid": not broken,
        "violations": [violation.to_json() for violation in broken],
        "fits": own.fits,
        "peak_allocated_bytes": int(own.memory_bytes),
        "limit_bytes": int(own.limit_bytes),
        "step_time_s": own.step_time_s,
        "memory": {name: int(held) for name, held in own.memory_parts.items()},
        "time": dict(own.time_parts),
        "stages": _stages(request),
        "levers": [_lever(one) for one in weighing.savers],
        "faster": [_lever(one) for one in weighing.faster],
        "without_effect": [one.lever.name for one in weighing.without_effect],
        "blocked": [
            {
                "name": one.lever.name,
                "changes": dict(one.lever.changes),
                "rule": one.rule,
                "message": one.message,
            }
            for one in weighing.blocked
        ],
        "better": None if better is None else _better(better, own),
    }


def _scales(request: EstimateRequest, frontend: str) -> Scales:
    from tuner.search.planning.estimator import SpaceEstimator
    from tuner.search.planning.weighing import Scales
    from tuner.search.planning.workplace import Workplace
    from tuner.search.validity import ValidityChecker
    from tuner.timing.shipped import precision_key, shipped_calibration

    key = precision_key(request.candidate, request.precision)
    place = Workplace(
        model=request.model,
        gpu=request.gpu,
        gpus_per_node=request.gpus_per_node,
        world_size=request.world_size,
        seq_length=request.seq_length,
        global_batch_size=request.global_batch_size,
        precision=request.precision,
        rates=shipped_calibration(request.gpu.name, key).rates,
        frontend=frontend,
    )
    version = mcore_version()
    checker = ValidityChecker(
        fixed={
            **rule_fields(request.model, version),
            **PRECISION_FIELDS.get(request.precision, PRECISION_FIELDS["bf16"]),
            "seq_length": request.seq_length,
            "global_batch_size": request.global_batch_size,
            "gpu": request.gpu.name,
        },
        world_size=request.world_size,
        mcore=version,
        frontend=frontend,
    )
    return Scales(SpaceEstimator(place), checker)


def _stages(request: EstimateRequest) -> list[dict[str, Any]]:
    """Peak bytes of each pipeline stage, and what the allocator loses beyond them; none where
    only a full dry run tells."""
    from tuner.estimation_composed import profile_source
    from tuner.memory.composition import MEMORY_PARTS, stage_memories

    try:
        found = stage_memories(
            request.model,
            request.candidate,
            profile_source(request),
            world_size=request.world_size,
            global_batch_size=request.global_batch_size,
        )
    except InputError:
        return []
    return [
        {
            "stage": stage,
            "peak_allocated_bytes": int(memory.peak[0]),
            "breakdown": {name: int(getattr(memory, name)[0]) for name in MEMORY_PARTS},
            "fragmentation_bytes": int(memory.fragmented[0]),
            "fragmentation_expandable_bytes": int(memory.fragmented_expandable[0]),
            "peaks_in_optimizer_step": bool(memory.step[0] > 0.999 * memory.activations[0]),
        }
        for stage, memory in enumerate(found)
    ]


def _lever(one: Weighed) -> dict[str, Any]:
    return {
        "name": one.lever.name,
        "changes": dict(one.lever.changes),
        "saved_bytes": int(one.saved_bytes),
        "added_s": one.added_s,
        "seconds_per_gib": one.seconds_per_gib,
        "peak_allocated_bytes": int(one.figures.memory_bytes),
        "step_time_s": one.figures.step_time_s,
        "fits": one.figures.fits,
    }


def _better(better: Better, own: Figures) -> dict[str, Any]:
    """The better configuration, and the levers that lead to it."""
    return {
        "levers": list(better.names),
        "config": better.candidate.to_flat(),
        "step_time_s": better.figures.step_time_s,
        "peak_allocated_bytes": int(better.figures.memory_bytes),
        "faster": 1.0 - better.figures.step_time_s / own.step_time_s,
    }


def _print(answer: Mapping[str, Any], name: str) -> None:
    out = console()
    verdict = ("fits", "green") if answer["fits"] else ("does not fit", "red")
    figures = (
        f"; {answer['peak_allocated_bytes'] / _GIB:.1f} of "
        f"{answer['limit_bytes'] / _GIB:.1f} GiB on the fullest rank, "
        f"step {answer['step_time_s']:.3g} s"
    )
    out.print(coloured(f"{name}: ", verdict, figures))
    for field, value in answer["assumed"].items():
        out.print(f"assumed: {field} {value:,}, which the configuration does not say")
    for violation in answer["violations"]:
        out.print(coloured(("invalid", "red"), f" ({violation['rule']}): {violation['message']}"))
    held = sorted(answer["memory"].items(), key=lambda item: -item[1])
    names = {"optimizer": "optimizer state"}
    stages = sorted(answer["stages"], key=lambda one: one["peak_allocated_bytes"])
    if stages and stages[-1]["peaks_in_optimizer_step"]:  # no pass's activations are in it
        names["activations"] = "what the optimizer's step holds meanwhile"
    parts = (f"{names.get(part, part)} {size / _GIB:.1f} GiB" for part, size in held)
    out.print("memory: " + ", ".join(parts))
    lost = [stage for stage in answer["stages"] if stage["fragmentation_bytes"] > 0.2 * _GIB]
    if lost:
        worst = max(lost, key=lambda stage: stage["fragmentation_bytes"])
        kept = worst["fragmentation_expandable_bytes"] / _GIB
        out.print(
            f"allocator: {worst['fragmentation_bytes'] / _GIB:.1f} GiB lost to fragmentation on "
            f"stage {worst['stage']}, {kept:.1f} GiB with expandable_segments:True"
        )
    if answer["levers"]:
        out.print(_table(answer["levers"], answer, "what saves memory, cheapest per GiB first"))
    if answer["faster"]:
        out.print(_table(answer["faster"], answer, "what saves time"))
    if answer["without_effect"]:
        out.print(f"nothing to gain here: {', '.join(answer['without_effect'])}")
    for one in answer["blocked"]:
        rule = "" if one["rule"] is None else f" ({one['rule']})"
        out.print(f"blocked: {one['name']}{rule}: {one['message']}")
    better = answer["better"]
    if better is not None:
        out.print(
            f"better: {', then '.join(better['levers'])}: step {better['step_time_s']:.3g} s, "
            f"{better['peak_allocated_bytes'] / _GIB:.1f} GiB"
        )


def _table(levers: Sequence[Mapping[str, Any]], answer: Mapping[str, Any], title: str) -> Any:
    from rich.table import Table

    columns = ("lever", "saves GiB", "step", "per GiB", "peak GiB", "")
    table = Table(*columns, title=title, box=None, pad_edge=False)
    for one in levers:
        cost = one["seconds_per_gib"]
        table.add_row(
            one["name"],
            f"{one['saved_bytes'] / _GIB:+.1f}",
            f"{one['added_s'] / answer['step_time_s']:+.1%}",
            "" if cost is None else f"{1e3 * cost:+.0f} ms",
            f"{one['peak_allocated_bytes'] / _GIB:.1f}",
            "fits" if one["fits"] else "too large",
        )
    return table
