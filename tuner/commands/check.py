"""`tuner check`: the verdict of the rules on one configuration, or on a file of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.commands.output import coloured, console, print_json
from tuner.configuration import full_configuration, mcore_version, misspelt_keys
from tuner.errors import InputError, nearest_name
from tuner.files import read_text
from tuner.formats.reader import expand, read_document

if TYPE_CHECKING:
    from tuner.constraints import CheckResult, FixResult, Violation

DEFAULT_FRONTEND = "mcore"
"""Whose rules judge settings that do not say whom they were written for."""


def run_check(
    config: Path | None,
    jsonl: Path | None,
    mcore: str | None,
    frontend: str | None,
    started_with: Sequence[str] = (),
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
    document = read_document(config, mcore=mcore, started_with=started_with)
    note_misspelt_keys(document, config)
    frontend = frontend or str(document.get("frontend") or DEFAULT_FRONTEND)
    _refuse_unknown_target(mcore, frontend)
    flat = full_configuration(document, mcore=mcore, where=str(config), base_folder=config.parent)
    result, fixed = _judged(flat, mcore, frontend, fix=fix)
    if as_json:
        print_json(_answer(result, fixed))
    else:
        _print_verdict(result, fixed, str(config), mcore, frontend)
    return 0 if result.valid else 1


def note_misspelt_keys(document: Mapping[str, Any], path: Path) -> None:
    """Say on standard error which keys of a document are passed over by a slip, and what reading
    it left open."""
    left_open = document.get("notes")
    for note in (*misspelt_keys(document), *(left_open if isinstance(left_open, list) else ())):
        print(f"tuner: {path}: {note}", file=sys.stderr)


def _judged(
    flat: Mapping[str, Any], mcore: str, frontend: str, *, fix: bool
) -> tuple[CheckResult, FixResult | None]:
    """The verdict, and the smallest valid change where it is wanted."""
    from tuner.constraints import check
    from tuner.constraints import fix as find_fix

    result = check(flat, mcore=mcore, frontend=frontend)
    return result, find_fix(flat, mcore=mcore, frontend=frontend) if fix else None


def _answer(result: CheckResult, fixed: FixResult | None) -> dict[str, Any]:
    return result.to_json() | ({} if fixed is None else {"fix": fixed.to_json()})


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
            answer = _answer(*_judged(flat, mcore, judge, fix=fix))
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


def _print_verdict(
    result: CheckResult, fixed: FixResult | None, name: str, mcore: str, frontend: str
) -> None:
    from rich.table import Table

    out = console()
    target = f"Megatron-Core {mcore}" + ("" if frontend == "mcore" else f", {frontend}")
    verdict = ("valid", "green") if result.valid else ("invalid", "red")
    line = coloured(f"{name}: ", verdict, f" for {target}")
    if result.valid and result.failures:
        line.append(", but ").append("the run fails", style="red")
    out.print(line)
    if result.violations:
        table = Table("kind", "rule", "what", "fix", box=None, pad_edge=False)
        order = list(_STYLES)
        for violation in sorted(result.violations, key=lambda v: order.index(_label(v))):
            label = _label(violation)
            fix = fix_text(violation.fix)
            table.add_row(label, violation.rule, violation.message, fix, style=_STYLES[label])
        out.print(table)
    if fixed is not None and result.failures:
        out.print(f"fix: {fix_text(fixed.changes) or 'none found'}")


def _label(violation: Violation) -> str:
    return "fails" if violation.doomed else violation.kind


def fix_text(fix: Mapping[str, Any] | None) -> str:
    """Field values as a user would write them; "" for none."""
    return ", ".join(f"{field}: {json.dumps(value)}" for field, value in (fix or {}).items())
