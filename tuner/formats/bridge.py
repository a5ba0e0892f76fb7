"""Export for Megatron Bridge: override arguments, a YAML file, or a Python function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tuner.formats import shell
from tuner.formats.bridge_fields import OVERLAP_CLASS, assignments, object_of
from tuner.formats.hydra import write_value
from tuner.formats.result import Exported, Settings, exporter


@exporter("bridge-cli")
def bridge_cli(settings: Settings) -> Exported:
    """`key=value` overrides for `scripts/training/run_recipe.py` and `scripts/performance`."""
    placed, left_out = assignments(settings)
    words = [_override(path, value) for path, value in placed.items()]
    lines = _heading(settings, "overrides", left_out)
    lines += shell.exports(settings.env)
    lines += shell.array("OVERRIDES", words)
    lines.append('# torchrun ... scripts/training/run_recipe.py --recipe RECIPE "${OVERRIDES[@]}"')
    return _exported("bridge-cli", settings, lines, left_out, tuple(words))


@exporter("bridge-yaml")
def bridge_yaml(settings: Settings) -> Exported:
    """A file that Bridge merges into a recipe's configuration (`config_filepath`)."""
    import yaml

    placed, left_out = assignments(settings)
    nested: dict[str, Any] = {}
    for path, value in placed.items():
        section, _, name = path.rpartition(".")
        holder = nested.setdefault(section, {}) if section else nested
        holder[name] = _configured(path, value)
    lines = _heading(settings, "configuration", left_out)
    lines += [f"# {line}" for line in shell.exports(settings.env)]
    lines.append(yaml.safe_dump(nested, sort_keys=False).rstrip())
    return _exported("bridge-yaml", settings, lines, left_out)


@exporter("bridge-python")
def bridge_python(settings: Settings) -> Exported:
    """A module with `apply(config)`, which edits a recipe's `ConfigContainer`, and `ENV`."""
    placed, left_out = assignments(settings)
    imports: dict[str, None] = {}
    body = [_statement(path, value, imports) for path, value in placed.items()]
    lines = ['"""A tuned configuration: call `apply` on the container of a recipe."""', ""]
    lines += [f"# not expressed: {name}: {reason}" for name, reason in left_out.items()]
    lines += [f"import {module}" for module in sorted(imports)]
    lines += ["", f"MEGATRON_CORE = {settings.mcore!r}"]
    lines += ["ENV = {", *(f"    {k!r}: {v!r}," for k, v in settings.env.items()), "}"]
    lines += ["", "", "def apply(config):"]
    lines += ['    """Make the recipe\'s configuration the tuned one, and hand it back."""']
    lines += [f"    {statement}" for statement in body]
    lines.append("    return config")
    return _exported("bridge-python", settings, lines, left_out)


def _heading(settings: Settings, what: str, left_out: Mapping[str, str]) -> list[str]:
    lines = [f"# Megatron Bridge {what} for Megatron-Core {settings.mcore}"]
    return lines + [f"# not expressed: {name}: {reason}" for name, reason in left_out.items()]


def _exported(
    name: str,
    settings: Settings,
    lines: list[str],
    left_out: Mapping[str, str],
    words: tuple[str, ...] = (),
) -> Exported:
    return Exported(
        format=name,
        mcore=settings.mcore,
        text="\n".join(lines) + "\n",
        arguments=words,
        env=dict(settings.env),
        left_out=left_out,
    )


def _override(path: str, value: Any) -> str:
    """`++` where the recipe's own value may be no mapping, or lie behind a property."""
    configured = _configured(path, value)
    force = isinstance(configured, Mapping) or path == "dataset.seq_length"
    return f"{'++' if force else ''}{path}={write_value(configured)}"


def _configured(path: str, value: Any) -> Any:
    """The value as OmegaConf holds it: objects as the node that instantiates them."""
    target = object_of(path, value)
    if target is not None:
        return {"_target_": target, "_call_": False}
    if path == "comm_overlap" and value is not None:
        return {"_target_": OVERLAP_CLASS, **value}
    return list(value) if isinstance(value, tuple) else value


def _statement(path: str, value: Any, imports: dict[str, None]) -> str:
    target = object_of(path, value)
    if target is not None:
        imports[_module_of(target)] = None
        return f"config.{path} = {target}"
    if path == "comm_overlap" and value is not None:
        imports[_module_of(OVERLAP_CLASS)] = None
        arguments = ", ".join(f"{key}={item!r}" for key, item in value.items())
        return f"config.{path} = {OVERLAP_CLASS}({arguments})"
    return f"config.{path} = {json.loads(json.dumps(value))!r}"


def _module_of(target: str) -> str:
    """What to import for a dotted name: all before the class or function."""
    parts = target.split(".")
    if parts[0] == "torch":
        return "torch" if len(parts) == 2 else ".".join(parts[:-1])
    upper = next((at for at, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
    return ".".join(parts[:upper])
