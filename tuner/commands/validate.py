"""`tuner validate`: estimates against measured runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.commands.output import console, print_json


def run_validate(data: Path, jsonl_out: Path | None, *, as_json: bool) -> int:
    """Compare every row of a file of measured runs with its estimate and print the errors."""
    from tuner.validation import validate

    document = validate(data, jsonl_out=jsonl_out)
    if as_json:
        print_json(document)
    else:
        _print_errors(document)
    return 0


def _print_errors(document: Mapping[str, Any]) -> None:
    from rich.table import Table

    out = console()
    table = Table("source", "rows", "median error", "90th percentile", "worst", box=None)
    memory = document["memory"]
    for source, figures in [*memory["by_source"].items(), ("all", memory)]:
        table.add_row(
            source,
            str(figures["n"]),
            *(
                "-" if figures[name] is None else f"{figures[name]:.1%}"
                for name in ("median_abs_err", "p90_abs_err", "max_abs_err")
            ),
        )
    out.print(table)
    out.print(f"{len(document['skipped'])} rows cannot be modelled (see --format json)")
