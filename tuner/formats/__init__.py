"""Configurations out of the tuner and into it, in the forms that training jobs take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.errors import InputError, nearest_name
from tuner.formats import bridge, megatron_args, plain  # noqa: F401 (they register exporters)
from tuner.formats.result import EXPORTERS, Exported
from tuner.formats.settings import settings_of

FORMATS = tuple(EXPORTERS)
"""The names that `--to` takes."""

__all__ = ["FORMATS", "Exported", "export_document"]


def export_document(
    document: Mapping[str, Any],
    to: str,
    *,
    mcore: str,
    where: str = "configuration",
    base_folder: Path = Path(),
) -> Exported:
    """A configuration in the form `to` for Megatron-Core `mcore` ("0.19", "0.16.1", ...).

    `document` is `{model, world_size, config, ...}` or a flat configuration. Raises InputError
    for an unknown form or version, or a document that cannot be read.
    """
    from tuner.constraints.registry import resolve_version

    write = EXPORTERS.get(to)
    if write is None:
        fix = nearest_name(to, EXPORTERS) or f"choose one of {', '.join(EXPORTERS)}"
        raise InputError(f"there is no format '{to}'", field="--to", fix=fix)
    try:
        version = resolve_version(mcore)
    except ValueError as error:
        raise InputError(str(error), field="--mcore") from None
    return write(settings_of(document, mcore=version, where=where, base_folder=base_folder))
