"""`tuner report`: one HTML file that says what a study found."""

from __future__ import annotations

from pathlib import Path

from tuner.commands.output import console, print_json, working


def run_report(study: Path, out: Path | None, *, as_json: bool) -> int:
    """Write the report of a study directory; `report.html` in it by default."""
    from tuner.report import print_short, study_report, write_page

    path = out or study / "report.html"
    with working("report") as told:
        report = study_report(study, told)
    write_page(report, path)
    if as_json:
        print_json({"report": str(path), "bytes": path.stat().st_size})
    else:
        print_short(report, console())
        console().print(str(path))
    return 0
