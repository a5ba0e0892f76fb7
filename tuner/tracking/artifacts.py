"""Files on their way to MLflow: copies without the credentials that a run may have printed."""

from __future__ import annotations

import shutil
from pathlib import Path

from tuner.redaction import redact

_TEXT = frozenset((".yaml", ".yml", ".json", ".jsonl", ".log", ".txt", ".sh", ".md", ".py", ""))


def clean_copy(path: Path, folder: Path) -> Path:
    """A copy of a file or folder inside `folder`; texts in it are redacted, the rest is as it is.

    Links are followed only to files inside `path`, so that none leads out of the study.
    """
    target = folder / path.name
    if not path.is_dir():
        _copy_file(path, target)
        return target
    root = path.resolve()
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.resolve().is_relative_to(root):
            inner = target / file.relative_to(path)
            inner.parent.mkdir(parents=True, exist_ok=True)
            _copy_file(file, inner)
    target.mkdir(exist_ok=True)
    return target


def _copy_file(path: Path, target: Path) -> None:
    if path.suffix.lower() in _TEXT:
        target.write_text(redact(path.read_text(errors="replace")))
    else:
        shutil.copyfile(path, target)
