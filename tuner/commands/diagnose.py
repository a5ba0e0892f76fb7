"""`tuner diagnose`: what happened in a run, from its log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.commands.output import coloured, console, print_json
from tuner.configuration import mcore_version
from tuner.errors import InputError

if TYPE_CHECKING:
    from tuner.diagnose import Diagnosis

_MAX_BYTES = 256 * 2**20


def run_diagnose(log: Path, mcore: str | None, frontend: str, *, as_json: bool) -> int:
    """Diagnose and print; 1 where the failure is not known."""
    from tuner.constraints.registry import resolve_version
    from tuner.diagnose import diagnose

    mcore = mcore or mcore_version()
    try:
        resolve_version(mcore)
    except ValueError as error:
        raise InputError(str(error), field="--mcore") from None
    answer = diagnose(_text(log), mcore=mcore, frontend=frontend)
    if as_json:
        print_json(answer.to_json())
    else:
        _print(answer, str(log))
    return 0 if answer.cause is not None else 1


def _text(path: Path) -> str:
    """The log, undecodable bytes replaced; of a huge one the beginning and the end."""
    if str(path) == "-":
        return sys.stdin.read()
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            if size <= _MAX_BYTES:
                raw = handle.read()
            else:
                raw = handle.read(_MAX_BYTES // 2)
                handle.seek(size - _MAX_BYTES // 2)
                raw += b"\n" + handle.read()
    except IsADirectoryError:
        raise InputError("is a directory, not a log", where=str(path)) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    return raw.decode("utf-8", errors="replace")


def _print(answer: Diagnosis, name: str) -> None:
    out = console()
    document: dict[str, Any] = answer.to_json()
    done = document["progress"]
    if done["train_iters"]:
        out.print(f"{name}: {answer.outcome}, iteration {done['iterations']}/{done['train_iters']}")
    else:
        out.print(f"{name}: {answer.outcome}")
    sure = f" (confidence {document['confidence']:.0%})" if answer.cause is not None else ""
    out.print(coloured((document["title"], "bold"), sure))
    out.print(f"  {document['cause']}" + (f", rule {document['rule']}" if document["rule"] else ""))
    out.print(f"  {document['explanation']}")
    for line in document["evidence"]:
        rank = "" if line["rank"] is None else f" rank {line['rank']}"
        out.print(f"  line {line['line']}{rank}: {line['text']}")
    for title, lines in (("fix", _fix_lines(document["fix"])),):
        for text in lines:
            out.print(f"  {title}: {text}")
    if document["likely_lines"]:
        out.print("likely lines:")
        for line in document["likely_lines"]:
            out.print(f"  {line['line']}: {line['text']}")
    for other in document["also"]:
        out.print(f"also: {other['cause']}: {other['title']}")


def _fix_lines(fix: dict[str, Any]) -> list[str]:
    import json

    lines = [f"{field}: {json.dumps(value)}" for field, value in fix["changes"].items()]
    lines += [f"export {name}={value}" for name, value in fix["env"].items()]
    return lines + list(fix["actions"])
