"""`tuner export`: a configuration in the form a training job takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.commands.check import fix_text
from tuner.commands.output import print_json
from tuner.configuration import mcore_version
from tuner.errors import InputError
from tuner.files import write_text


def run_export(
    source: Path,
    to: str,
    mcore: str | None,
    output: Path | None,
    started_with: Sequence[str] = (),
    *,
    as_json: bool,
) -> int:
    """Export and print, or write to `output`; 1 where the form cannot express a field."""
    from tuner.formats import export_document

    mcore = mcore or mcore_version()
    document, path = load_source(source, mcore, started_with)
    _refuse_impossible_values(document, mcore, path)
    exported = export_document(document, to, mcore=mcore, where=str(path), base_folder=path.parent)
    for name, reason in (exported.left_out or {}).items():
        print(f"tuner: not expressed: {name}: {reason}", file=sys.stderr)
    _warn_of_refusals(document, to, mcore, path)
    if output is not None:
        write_text(output, exported.text)
    if as_json:
        print_json(exported.to_json())
    elif output is None:
        print(exported.text, end="")
    return 1 if exported.left_out else 0


def _refuse_impossible_values(document: Mapping[str, Any], mcore: str, path: Path) -> None:
    """Raise InputError for a value that no version of its field can have."""
    from tuner.configuration import full_configuration
    from tuner.constraints import check
    from tuner.constraints.result import TYPE_RULES

    env = document.get("env")
    if env is not None and not isinstance(env, Mapping):
        raise InputError("is not a mapping of variables to values", where=str(path), field="env")
    fields = full_configuration(document, mcore=mcore, where=str(path), base_folder=path.parent)
    for violation in check(fields, mcore=mcore).errors:
        if violation.rule in TYPE_RULES:
            raise InputError(violation.message, where=str(path))


def _warn_of_refusals(document: Mapping[str, Any], to: str, mcore: str, path: Path) -> None:
    """Say on standard error what the training job will refuse of the export, or fail at."""
    from tuner.candidate import Candidate
    from tuner.configuration import full_configuration
    from tuner.constraints import check

    config = document.get("config")
    if to == "yaml" or document.get("model") is None or not isinstance(config, Mapping):
        return
    frontend = "megatron-lm" if to == "megatron-args" else "bridge"
    try:
        written = {**document, "config": Candidate.from_flat(config).to_flat(mcore=mcore)}
    except ValueError:
        return
    fields = full_configuration(written, mcore=mcore, where=str(path), base_folder=path.parent)
    for violation in check(fields, mcore=mcore, frontend=frontend).failures:
        told = f"tuner: {frontend} refuses it: {violation.rule}: {violation.message}"
        fix = f" (fix: {fix_text(violation.fix)})" if violation.fix else ""
        print(told + fix, file=sys.stderr)


def load_source(
    source: Path, mcore: str, started_with: Sequence[str] = ()
) -> tuple[Mapping[str, Any], Path]:
    """The document of a configuration file, or of the best candidate of a study directory."""
    from tuner.formats.reader import read_document

    path = source / "best.yaml" if source.is_dir() else source
    if source.is_dir() and not path.exists():
        raise InputError(
            "holds no best.yaml: no trial of the study has completed",
            where=str(source),
            fix="give a study directory with a completed trial, or a configuration file",
        )
    return read_document(path, mcore=mcore, started_with=started_with), path
