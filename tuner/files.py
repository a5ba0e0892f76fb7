"""Reading the YAML and JSON files that users give, with errors that name the file and the line, and
writing what they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner.errors import InputError

MAX_BYTES = 16 * 2**20
_MAX_NODES = 1_000_000  # of a document with its aliases written out


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
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputError(f"is larger than {MAX_BYTES >> 20} MiB", where=str(path))
        return data.decode("utf-8")
    except FileNotFoundError:
        raise InputError("no such file", where=str(path), fix="check the path") from None
    except UnicodeDecodeError:
        raise InputError("is not UTF-8 text", where=str(path)) from None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read: {reason}", where=str(path)) from None


def write_text(path: Path, text: str) -> None:
    """Write a file that a user asked for. Raises InputError where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise InputError(reason, where=str(path), fix="choose another file") from None


def parse_yaml_mapping(text: str, *, where: str) -> dict[str, Any]:
    """The mapping in a YAML text; the safe loader, so no object is ever constructed."""
    import yaml

    try:
        document = _loaded(text, where)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}" if mark is not None else ""
        raise InputError(f"is not YAML: {error.problem}", where=where, field=place) from None
    except InputError:
        raise
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


def _loaded(text: str, where: str) -> Any:
    loader = _loader()(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, where)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count(node: Any, known: dict[int, int | None], where: str) -> int:
    """Nodes of a YAML tree, aliases written out.

    Raises InputError for what would be no tree, for one that grows without measure, and for a key
    that is given twice.
    """
    import yaml

    place = f"line {node.start_mark.line + 1}"
    if id(node) in known:
        counted = known[id(node)]
        if counted is None:
            raise InputError("contains itself through an alias", where=where, field=place)
        return counted
    known[id(node)] = None
    children: list[Any] = []
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if key.value in seen:
                place = f"line {key.start_mark.line + 1}"
                raise InputError(f"the key {key.value!r} is given twice", where=where, field=place)
            seen.add(key.value)
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    total = 1 + sum(_count(child, known, where) for child in children)
    if total > _MAX_NODES:
        raise InputError("is too large with its aliases written out", where=where, field=place)
    known[id(node)] = total
    return total


def _loader() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)
