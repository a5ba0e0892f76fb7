"""Configurations that exist already, as the document that the tuner's commands take.

Read are Megatron-LM command lines and launch scripts, Megatron Bridge override lists and YAML
files, and the tuner's own YAML. What is found becomes `{model, world_size, config, ...}` with flat
Megatron field names; `frontend` says whose rules the settings were written for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.candidate import DEFAULTS
from tuner.errors import InputError
from tuner.files import MAX_BYTES, parse_yaml_mapping, read_text
from tuner.formats import shell
from tuner.formats.bridge_reader import SECTIONS, is_override, read_nested, read_overrides
from tuner.formats.megatron_reader import (
    architecture,
    effective_fields,
    given_fields,
    passed_by,
    read_options,
)

SOURCES = ("megatron_args", "megatron_script", "bridge_overrides", "bridge_yaml")
"""Keys of a document that hold settings in another form than the tuner's."""

_OPTION = re.compile(r"(^|\s|['\"])--[a-z][\w-]+", re.MULTILINE)
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_RUN_FIELDS = ("seq_length", "global_batch_size")


def read_document(
    path: Path, *, mcore: str, effective: bool = False, started_with: Sequence[str] = ()
) -> dict[str, Any]:
    """The configuration in a file of any of the forms, or of standard input for "-".

    With `effective`, a Megatron-LM line also gets the fields that the command line adds before
    Megatron-Core sees them, as an estimate needs. `started_with` are arguments and `NAME=VALUE`
    variables that a launch script is started with. Raises InputError naming the file.
    """
    text, where = _source(path)
    return _read(text, where, path.parent, mcore, effective, started_with)


def read_given_and_effective(
    path: Path, *, mcore: str, started_with: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`read_document` without and with `effective`, of a source that can be read once only."""
    text, where = _source(path)
    given = _read(text, where, path.parent, mcore, False, started_with)
    return given, _read(text, where, path.parent, mcore, True, started_with)


def _source(path: Path) -> tuple[str, str]:
    """The text of a file or of standard input, and how to name it."""
    import sys

    if str(path) == "-":
        return sys.stdin.read(MAX_BYTES), "standard input"
    return read_text(path), str(path)


def _read(
    text: str, where: str, base: Path, mcore: str, effective: bool, started_with: Sequence[str]
) -> dict[str, Any]:
    document = read_configuration(
        text, mcore=mcore, where=where, effective=effective, started_with=started_with
    )
    return expand(
        document,
        mcore=mcore,
        where=where,
        base=base,
        effective=effective,
        started_with=started_with,
    )


def read_configuration(
    text: str,
    *,
    mcore: str,
    where: str = "configuration",
    effective: bool = False,
    started_with: Sequence[str] = (),
) -> dict[str, Any]:
    """The configuration in a text of any of the forms. Raises InputError where it is none."""
    mapping = _yaml_mapping(text, where)
    if mapping is not None and started_with and "megatron_script" not in mapping:
        raise InputError("is no launch script, which arguments could be given to", where=where)
    if mapping is not None and {"model_type", "architectures"}.intersection(mapping):
        raise InputError(
            "is a model's config.json of Hugging Face, not a configuration of a run",
            where=where,
            fix="name it in one: `model: {hf_config: PATH}`; `tuner plan PATH` takes it as it is",
        )
    if mapping is not None:
        return bridge_document(read_nested(mapping)) if is_bridge_yaml(mapping) else mapping
    try:
        script = shell.read_script(text, started_with)
    except ValueError as error:
        raise InputError(f"cannot be read as a command line: {error}", where=where) from None
    words = _settings_words(script)
    if any(is_override(word) for word in words):
        return _from_words(words, script, mcore, where, effective, bridge=True)
    if _OPTION.search(text):
        return _from_words(words, script, mcore, where, effective, bridge=False)
    return parse_yaml_mapping(text, where=where)  # raises what is wrong with it as YAML


def expand(
    document: Mapping[str, Any],
    *,
    mcore: str,
    where: str,
    base: Path,
    effective: bool = False,
    started_with: Sequence[str] = (),
) -> dict[str, Any]:
    """The document with the settings of one of SOURCES put in its terms.

    Paths (`megatron_script`, `bridge_yaml`) are relative to `base`; `script_args`, and
    `started_with` after them, are arguments and variables that a `megatron_script` is started with.
    What stands beside the source
    wins, field by field. Raises InputError where more than one source is given.
    """
    given = [name for name in SOURCES if name in document]
    if not given:
        return dict(document)
    if len(given) > 1:
        raise InputError(f"give one of {', '.join(given)}", where=where)
    source, rest = given[0], {k: v for k, v in document.items() if k not in SOURCES}
    own = rest.pop("script_args", None) or []
    if own and source != "megatron_script":
        raise InputError("belongs to a megatron_script", where=where, field="script_args")
    if not isinstance(own, list):
        raise InputError("is not a list", where=where, field="script_args")
    if not all(isinstance(word, (str, int)) and not isinstance(word, bool) for word in own):
        raise InputError("holds what is no word", where=where, field="script_args")
    words = [*(str(word) for word in own), *started_with]
    read = _read_source(
        source, document[source], mcore, f"{where}: {source}", base, effective, words
    )
    config = {**read.get("config", {}), **(rest.pop("config", None) or {})}
    return {**read, **rest, "config": config}


def starting_fields(
    entry: Mapping[str, Any],
    *,
    tunable: Collection[str],
    mcore: str,
    where: str,
    base: Path,
) -> dict[str, Any]:
    """A job's starting candidate; of settings in another form, only what the search tunes.

    `tunable` names the fields of the search space, variables as `env.NAME`.
    """
    if not any(name in entry for name in SOURCES):
        return dict(entry)
    config = expand(entry, mcore=mcore, where=where, base=base, effective=True)["config"]
    env = config.pop("env", None) or {}
    fields = {name: value for name, value in config.items() if name in tunable or name in DEFAULTS}
    kept = {name: value for name, value in env.items() if f"env.{name}" in tunable}
    return {**fields, "env": kept} if kept else fields


def _read_source(
    source: str,
    value: Any,
    mcore: str,
    where: str,
    base: Path,
    effective: bool,
    started_with: Sequence[str],
) -> dict[str, Any]:
    if source == "bridge_yaml":
        if isinstance(value, str):
            value = parse_yaml_mapping(read_text(base / value), where=where)
        if not isinstance(value, Mapping):
            raise InputError("is neither a mapping nor a path", where=where)
        return bridge_document(read_nested(value))
    if source == "megatron_script":
        value = read_text(base / str(value))
    if isinstance(value, list):
        words = [str(word) for word in value]
        script = shell.Script()
    elif isinstance(value, str):
        try:
            script = shell.read_script(value, started_with)
        except ValueError as error:
            raise InputError(f"cannot be read as words: {error}", where=where) from None
        words = _settings_words(script)
    else:
        raise InputError("is neither a text nor a list of words", where=where)
    bridge = source == "bridge_overrides"
    return _from_words(words, script, mcore, where, effective, bridge=bridge)


def _yaml_mapping(text: str, where: str) -> dict[str, Any] | None:
    """The mapping of a YAML text; None for what is rather a command line."""
    try:
        mapping = parse_yaml_mapping(text, where=where)
    except InputError:
        if _OPTION.search(text) or any(is_override(word) for word in text.split()):
            return None
        raise
    return None if any(_OPTION.match(key) for key in mapping) else mapping


def is_bridge_yaml(mapping: Mapping[str, Any]) -> bool:
    """Whether a mapping holds parts of Bridge's container rather than the tuner's keys."""
    if "config" in mapping or any(name in mapping for name in SOURCES):
        return False
    parts = [name for name in mapping if name in SECTIONS and isinstance(mapping[name], Mapping)]
    return bool(parts) and all(name in SECTIONS or name == "env_vars" for name in mapping)


def bridge_document(fields: dict[str, Any]) -> dict[str, Any]:
    """The document of flat fields read from Bridge settings."""
    document = {name: fields[name] for name in _RUN_FIELDS if fields.get(name) is not None}
    config = {name: value for name, value in fields.items() if name not in document}
    return {**document, "config": config, "frontend": "bridge"}


def _from_words(
    words: Sequence[str],
    script: shell.Script,
    mcore: str,
    where: str,
    effective: bool,
    *,
    bridge: bool,
) -> dict[str, Any]:
    try:
        if bridge:
            document = bridge_document(read_overrides(words))
            model = _recipe_model(words)
            document |= {"model": model} if model else {}
        else:
            document = _megatron_document(words, mcore, effective)
    except InputError as error:
        raise error.at(where) from None
    if script.undecided:
        document["notes"] = document.get("notes", []) + [
            f"both ways are read, the last setting holds: {condition}"
            + (" (--script-arg gives what it is started with)" if "$" in condition else "")
            for condition in script.undecided
        ]
    world = _world_size(script)
    if world is not None:
        document["world_size"] = world
    env = {name: value for name, value in script.env.items() if _is_tuning_variable(name)}
    if env:
        document["config"]["env"] = env
    return document


def _megatron_document(words: Sequence[str], mcore: str, effective: bool) -> dict[str, Any]:
    from tuner.constraints.registry import resolve_version

    options = read_options(words, resolve_version(mcore))
    if not options.values:
        raise InputError("holds no option of Megatron-LM")
    given = given_fields(options)
    config = effective_fields(options, given) if effective else given
    document: dict[str, Any] = {"frontend": "megatron-lm"}
    model = architecture(options) if "num_layers" in options.values else {}
    model = {name: list(v) if isinstance(v, tuple) else v for name, v in model.items()}
    if "vocab_size" in model:
        document["model"] = model
    else:
        config = {**model, **config}
    for name in _RUN_FIELDS:
        if config.get(name) is not None:
            document[name] = config.pop(name)
    precision = config.get("params_dtype")
    notes = passed_by(words, options)
    document |= {"notes": notes} if notes else {}
    return {**document, "precision": precision, "config": config}


def _settings_words(script: shell.Script) -> list[str]:
    """The words of the command that carries settings; of all arrays where none does."""

    def weight(words: Sequence[str]) -> int:
        return sum(word.startswith("--") or is_override(word) for word in words)

    candidates = [words for words in script.commands if weight(words)]
    variables = [words for name, words in script.variables.items() if name.isidentifier()]
    if candidates:
        best = max(candidates, key=weight)
        inside = sum(weight(words) for words in variables)
        if weight(best) >= inside or len(candidates) > 1:
            return list(best)
    arrays = [word for words in variables for word in words]
    return [word for words in candidates for word in words] + arrays


def _world_size(script: shell.Script) -> int | None:
    """Processes that torchrun starts in all, where the script says both numbers."""
    for words in script.commands:
        if not any(word.endswith(_LAUNCHERS) for word in words):
            continue
        per_node = _launch_number(words, "nproc-per-node", default=None)
        nodes = _launch_number(words, "nnodes", default=1)
        if per_node and nodes:
            return per_node * nodes
    return None


def _launch_number(words: Sequence[str], option: str, default: int | None) -> int | None:
    for at, word in enumerate(words):
        flag, equals, attached = word.partition("=")
        if flag.lstrip("-").replace("_", "-") == option and flag.startswith("-"):
            value = attached if equals else words[at + 1] if at + 1 < len(words) else ""
            return int(value) if value.isdigit() else None
    return default


_VARIABLES = ("CUDA_DEVICE_MAX", "NCCL_", "NVTE_", "PYTORCH_", "TORCH_NCCL", "NVSHMEM_", "TORCH_")


def _is_tuning_variable(name: str) -> bool:
    return name.startswith(_VARIABLES)


def _recipe_model(words: Sequence[str]) -> str | None:
    """The catalogue model that `--recipe` or `--model` names, where there is exactly one."""
    from tuner.models import model_names

    for at, word in enumerate(words[:-1]):
        if word not in ("--recipe", "--model"):
            continue
        stem = re.split(
            r"_(?:pretrain|sft|peft|finetune)\b|_(?:pretrain|sft|peft|finetune)_", words[at + 1]
        )[0]
        wanted = re.sub(r"[^a-z0-9]", "", stem.lower())
        found = [n for n in model_names() if re.sub(r"[^a-z0-9]", "", n.lower()) == wanted]
        return found[0] if len(found) == 1 else None
    return None
