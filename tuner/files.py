"""Reading the YAML and JSON files that users give, with errors that name the file and the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner.errors import InputError

_MAX_BYTES = 16 * 2**20


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML (or JSON) file.

    Raises InputError where the file is missing, unreadable, not YAML, or not a mapping of names.
    """
    return parse_yaml_mapping(read_text(path), where=str(path))


def read_text(path: Path) -> str:
    """The text of a user's file, or InputError naming it."""
    try:
        if path.is_dir():
            raise InputError("is a directory, not a file", where=str(path))
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(f"is larger than {_MAX_BYTES >> 20} MiB", where=str(path))
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError("no such file", where=str(path), fix="check the path") from None
    except UnicodeDecodeError:
        raise InputError("is not UTF-8 text", where=str(path)) from None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read: {reason}", where=str(path)) from None


def parse_yaml_mapping(text: str, *, where: str) -> dict[str, Any]:
    """The mapping in a YAML text; the safe loader, so no object is ever constructed."""
    import yaml

    try:
        document = yaml.load(text, Loader=_loader())  # noqa: S506 (a safe loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}" if mark is not None else ""
        raise InputError(f"is not YAML: {error.problem}", where=where, field=place) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"is not YAML: {first_line}", where=where) from None
    if not isinstance(document, dict):
        kind = "empty" if document is None else f"a {type(document).__name__}"
        raise InputError(f"is {kind}, not a mapping of names to values", where=where)
    for key in document:
        if not isinstance(key, str):
            raise InputError(f"the key {key!r} is not a name", where=where, fix="quote it")
    return document


def _loader() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)
