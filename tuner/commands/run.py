"""`tuner run`: one candidate alone, without Ray."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.commands.output import console, print_json
from tuner.errors import InputError
from tuner.files import read_yaml_mapping
from tuner.measurement import Outcome, TrialSpec

_REQUIRED = ("model", "world_size", "seq_length", "global_batch_size", "config")
_RUN_KEYS = ("warmup_steps", "measure_steps", "seed", "memory_limit_bytes", "timeout_s")


def run_one(config: Path, folder: Path | None, *, as_json: bool) -> int:
    """Run the candidate of a file; 0 where it completed, 1 where it did not."""
    import trainables

    document = read_yaml_mapping(config)
    spec = spec_of(document, where=str(config), base_folder=config.parent)
    try:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="tuner-run-"))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(folder)) from None
    name = str(document.get("trainable", "megatron_core"))
    if name not in trainables.names():
        raise InputError(f"there is no trainable '{name}'", where=str(config), field="trainable")
    result = trainables.get(name).run_trial(spec, folder)
    if as_json:
        print_json(result.to_json())
        return 0 if result.outcome is Outcome.COMPLETED else 1
    out = console()
    out.print(f"{result.outcome}" + (f": {result.reason}" if result.reason else ""))
    measured = result.measurement
    if measured is not None:
        out.print(
            f"step {measured.step_time_s:.3f} s (spread {measured.step_time_spread_s:.3f}), "
            f"{measured.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
            f"{measured.tflops_per_gpu:.4g} TFLOP/s/GPU, "
            f"peak {measured.peak_memory_allocated_bytes} bytes"
        )
    out.print(f"logs: {folder}")
    return 0 if result.outcome is Outcome.COMPLETED else 1


def spec_of(document: Mapping[str, Any], *, where: str, base_folder: Path) -> TrialSpec:
    """The trial a file of the form of best.yaml asks for. Raises InputError naming the field."""
    from tuner.configuration import resolve_model

    for key in _REQUIRED:
        if document.get(key) is None:
            raise InputError("this field is required", where=where, field=key, fix="add it")
    if not isinstance(document["config"], Mapping):
        raise InputError("is not a mapping of fields", where=where, field="config")
    try:
        model = resolve_model(document["model"], base_folder)
    except InputError as error:
        raise error.at(where, "model") from None
    except ValueError as error:
        raise InputError(str(error), where=where, field="model") from None
    options = document.get("options") or {}
    if not isinstance(options, Mapping):
        raise InputError("is not a mapping", where=where, field="options")
    run = document.get("run") or {}
    if not isinstance(run, Mapping):
        raise InputError("is not a mapping", where=where, field="run")
    unknown = sorted(set(run) - set(_RUN_KEYS))
    if unknown:
        raise InputError(f"unknown key '{unknown[0]}'", where=where, field="run")
    for key in ("world_size", "seq_length", "global_batch_size"):
        value = document[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{value!r} is not a positive integer", where=where, field=key)
    return TrialSpec(
        model=model.to_flat(),
        config=dict(document["config"]),
        world_size=document["world_size"],
        seq_length=document["seq_length"],
        global_batch_size=document["global_batch_size"],
        precision=str(document.get("precision", "bf16")),
        device=str(document.get("device", "cuda")),
        options=dict(options),
        **{key: run[key] for key in _RUN_KEYS if key in run},
    )
