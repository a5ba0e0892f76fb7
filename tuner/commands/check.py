"""`tuner check`: the verdict of the rules on one configuration, or on a file of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner.commands.output import console, print_json
from tuner.configuration import full_configuration, mcore_version, misspelt_keys
from tuner.errors import InputError, nearest_name
from tuner.files import read_text
from tuner.formats.reader import expand, read_document

DEFAULT_FRONTEND = "mcore"
"""Whose rules judge settings that do not say whom they were written for."""


def run_check(
    config: Path | None,
    jsonl: Path | None,
    mcore: str | None,
    frontend: str | None,
    *,
    fix: bool,
    as_json: bool,
) -> int:
    """Check and print; 0 where every configuration is valid, 1 where one is not."""
    mcore = mcore or mcore_version()
    _refuse_unknown_target(mcore, frontend or DEFAULT_FRONTEND)
    if (config is None) == (jsonl is None):
        raise InputError("give a CONFIG file or --jsonl FILE", fix="see tuner check --help")
    if jsonl is not None:
        return _check_lines(jsonl, mcore, frontend, fix=fix)
    assert config is not None
    document = read_document(config, mcore=mcore)
    note_misspelt_keys(document, config)
    frontend = frontend or str(document.get("frontend") or DEFAULT_FRONTEND)
    _refuse_unknown_target(mcore, frontend)
    flat = full_configuration(document, mcore=mcore, where=str(config), base_folder=config.parent)
    answer = _answer(flat, mcore, frontend, fix=fix)
    if as_json:
        print_json(answer)
    else:
        _print_verdict(answer, str(config), mcore, frontend)
    return 0 if answer["valid"] else 1


def note_misspelt_keys(document: Mapping[str, Any], path: Path) -> None:
    """Say on standard error which keys of a document are passed over by a slip, and what reading
    it left open."""
    for note in (*misspelt_keys(document), *document.get("notes", ())):
        print(f"tuner: {path}: {note}", file=sys.stderr)


def _answer(flat: Mapping[str, Any], mcore: str, frontend: str, *, fix: bool) -> dict[str, Any]:
    from tuner.constraints import check

    result = check(flat, mcore=mcore, frontend=frontend)
    answer = result.to_json()
    if fix:
        from tuner.constraints import fix as find_fix

        fixed = find_fix(flat, mcore=mcore, frontend=frontend)
        answer["fix"] = fixed.to_json()
    return answer


def _check_lines(path: Path, mcore: str, frontend: str | None, *, fix: bool) -> int:
    """One JSON answer per input line, in order; a line that is no configuration says so."""
    all_valid = True
    for number, line in numbered_lines(path):
        where = f"{path}:{number}"
        try:
            document = json.loads(line)
            if not isinstance(document, dict):
                raise InputError("is not a JSON object", where=where)
            document = expand(document, mcore=mcore, where=where, base=path.parent)
            judge = frontend or str(document.get("frontend") or DEFAULT_FRONTEND)
            _refuse_unknown_target(mcore, judge)
            flat = full_configuration(document, mcore=mcore, where=where, base_folder=path.parent)
            answer = _answer(flat, mcore, judge, fix=fix)
        except (ValueError, RecursionError) as error:
            message = str(error) if isinstance(error, InputError) else f"{where}: {error}"
            answer = {"valid": False, "violations": [], "rewrites": {}, "input_error": message}
        all_valid &= bool(answer["valid"])
        print(json.dumps(answer, default=str))
    return 0 if all_valid else 1


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, blank ones left out; "-" is standard input."""
    if str(path) != "-" and not path.is_file():
        read_text(path)  # raises the error that names what is wrong with it
    with open(0 if str(path) == "-" else path, encoding="utf-8", errors="replace") as handle:
        for number, line in enumerate(handle, start=1):
            if line.strip():
                yield number, line


def _refuse_unknown_target(mcore: str, frontend: str) -> None:
    from tuner.constraints.registry import FRONTENDS, resolve_version

    try:
        resolve_version(mcore)
    except ValueError as error:
        raise InputError(str(error), field="--mcore") from None
    if frontend not in FRONTENDS:
        raise InputError(
            f"there is no front end '{frontend}'",
            field="--frontend",
            fix=nearest_name(frontend, FRONTENDS) or f"choose one of {', '.join(FRONTENDS)}",
        )


_STYLES = {"error": "red", "fails": "red", "rewrite": "yellow", "advice": "cyan"}


def _print_verdict(answer: Mapping[str, Any], name: str, mcore: str, frontend: str) -> None:
    from rich.table import Table

    from tuner.constraints.registry import foretells_failure

    out = console()
    target = f"Megatron-Core {mcore}" + ("" if frontend == "mcore" else f", {frontend}")
    verdict = "[green]valid[/green]" if answer["valid"] else "[red]invalid[/red]"
    labels = {
        number: "fails" if foretells_failure(found["rule"], found["kind"]) else found["kind"]
        for number, found in enumerate(answer["violations"])
    }
    doomed = answer["valid"] and "fails" in labels.values()
    out.print(f"{name}: {verdict} for {target}" + (", but [red]the run fails[/red]" * doomed))
    if labels:
        table = Table("kind", "rule", "what", "fix", box=None, pad_edge=False)
        for number in sorted(labels, key=lambda number: list(_STYLES).index(labels[number])):
            violation = answer["violations"][number]
            table.add_row(
                labels[number],
                violation["rule"],
                violation["message"],
                _fix_text(violation["fix"]),
                style=_STYLES[labels[number]],
            )
        out.print(table)
    if "fix" in answer and (doomed or not answer["valid"]):
        out.print(f"fix: {_fix_text(answer['fix'].get('changes')) or 'none found'}")


def _fix_text(fix: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{field}: {json.dumps(value)}" for field, value in (fix or {}).items())
