"""`tuner report`: one HTML file that says what a study found."""

from __future__ import annotations

from pathlib import Path

from tuner.commands.output import console, print_json
from tuner.errors import InputError


def run_report(study: Path, out: Path | None, *, as_json: bool) -> int:
    """Write the report of a study directory; `report.html` in it by default."""
    from tuner.report import render, study_report

    path = out or study / "report.html"
    page = render(study_report(study))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}",
            where=str(path),
            fix="choose another file with --out",
        ) from None
    if as_json:
        print_json({"report": str(path), "bytes": path.stat().st_size})
    else:
        console().print(str(path))
    return 0
