"""`tuner models`: what the catalogue holds."""

from __future__ import annotations

from tuner.commands.output import console, print_json
from tuner.models import count_parameters, get_model, model_names


def list_models(*, as_json: bool) -> int:
    """Print each catalogue model with its size; the exit code."""
    rows = []
    for name in model_names():
        counts = count_parameters(get_model(name))
        rows.append({"name": name, "parameters": counts.total, "active_parameters": counts.active})
    if as_json:
        print_json({"models": rows})
        return 0
    from rich.table import Table

    table = Table("model", "parameters", "active per token", box=None)
    for row in rows:
        table.add_row(str(row["name"]), f"{row['parameters']:,}", f"{row['active_parameters']:,}")
    console().print(table)
    return 0
