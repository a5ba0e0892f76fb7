"""MkDocs hook: the job reference from the job's schema, the CLI reference from the CLI.

Navigation entries with a star stand for every page of that name that exists.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_GENERATED = ("job.md", "cli.md")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand starred navigation entries."""
    pages = sorted(path.name for path in Path(config.docs_dir).glob("*.md"))
    config.nav = _expanded(config.nav or [], pages)
    return config


def _expanded(entries: list[Any], pages: list[str]) -> list[Any]:
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            found.append({name: _expanded(inner, pages) for name, inner in entry.items()})
        elif "*" in entry:
            found += fnmatch.filter(pages, entry)
        else:
            found.append(entry)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, content in zip(_GENERATED, (job_page(), cli_page()), strict=True):
        files.append(File.generated(config, name, content=content))
    return files


def job_page() -> str:
    """The job file, section by section, from its JSON Schema."""
    from tuner.job import job_schema

    schema = job_schema()
    lines = [
        "# Job file",
        "",
        "Generated from the schema that `tuner job-schema` prints.",
        "",
        *_section("Job", schema, schema),
    ]
    return "\n".join(lines) + "\n"


def _section(title: str, part: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    if part.get("description"):
        yield part["description"]
        yield ""
    yield "| field | kind | default | what |"
    yield "| --- | --- | --- | --- |"
    required = part.get("required", [])
    for name, field in part["properties"].items():
        default = "required" if name in required else _default(field)
        what = _cell(field.get("description", ""))
        yield f"| `{name}` | {_kind(field, schema)} | {default} | {what} |"
    yield ""
    for name, field in part["properties"].items():
        inner = _referred(field, schema)
        if inner is not None and "properties" in inner:
            yield from _section(f"{title}.{name}" if title != "Job" else name, inner, schema)


def _referred(field: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for option in (field, *field.get("anyOf", ()), *field.get("allOf", ())):
        if "$ref" in option:
            part: Mapping[str, Any] = schema["$defs"][option["$ref"].rpartition("/")[2]]
            return part
    return None


def _kind(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if _referred(field, schema) is not None:
        return "section"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        kinds = dict.fromkeys(_kind(option, schema) for option in field["anyOf"])
        return " or ".join(kind for kind in kinds if kind != "null")
    return str(field.get("type", "any"))


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    if default is None or isinstance(default, (dict, list)):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def cli_page() -> str:
    """Every command with its arguments and options, from the CLI itself."""
    import typer

    from tuner.cli import app

    root = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        "Generated from the command line itself. `--quiet` and `--no-color` may stand anywhere.",
        "`tuner --install-completion` sets up completion for your shell.",
        "",
        *_options(root),
        *_commands(root, "tuner"),
    ]
    return "\n".join(lines) + "\n"


def _commands(group: click.Command, path: str) -> Iterator[str]:
    for name, command in sorted(getattr(group, "commands", {}).items()):
        yield f"## {path} {name}"
        yield ""
        yield command.help or ""
        yield ""
        yield from _options(command)
        yield from _commands(command, f"{path} {name}")


def _options(command: click.Command) -> Iterator[str]:
    rows = []
    for parameter in command.params:
        argument = parameter.param_type_name == "argument"
        names = (parameter.name or "").upper() if argument else ", ".join(parameter.opts)
        what = _cell(getattr(parameter, "help", None) or "")
        if what and "--help" not in parameter.opts:
            rows.append(f"| `{names}` | {what} |")
    if rows:
        yield from ("| argument or option | what |", "| --- | --- |", *rows, "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
