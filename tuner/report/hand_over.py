"""What a study hands over at its end: report, best configuration in every form, timeline, note."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import InputError
from tuner.files import read_yaml_mapping
from tuner.report.markdown import note
from tuner.report.page import write_page
from tuner.report.study import study_report
from tuner.study_dir import StudyDirectory

_LOG = logging.getLogger(__name__)
_SUFFIXES = {
    "bridge-cli": "sh",
    "bridge-yaml": "yaml",
    "bridge-python": "py",
    "megatron-args": "sh",
    "yaml": "yaml",
}
TIMELINE = "predicted-timeline.json"


@dataclass(frozen=True, slots=True)
class HandOver:
    """Files and folders of a study directory that people take away, and a note in Markdown."""

    note: str
    paths: tuple[Path, ...]


def hand_over(directory: StudyDirectory, *, predictions: bool = True) -> HandOver:
    """Write `report.html`, `exports/` and the predicted timeline of a study that has a summary.

    Without `predictions` nothing is estimated, which takes no time. What cannot be made is logged
    and left out: a study that has ended is not lost for a report.
    """
    report = study_report(directory.path, predictions=predictions)
    page = directory.path / "report.html"
    write_page(report, page)
    paths = [page]
    if report.predictions.pipeline is not None:
        from tuner.measurement import write_json_atomically

        write_json_atomically(directory.path / TIMELINE, report.predictions.pipeline)
        paths.append(directory.path / TIMELINE)
    exports = write_exports(directory)
    return HandOver(note(report), (*paths, *([] if exports is None else [exports])))


def write_exports(directory: StudyDirectory) -> Path | None:
    """The best candidate in every form, one file each; None where no trial completed."""
    from tuner.configuration import mcore_version
    from tuner.formats import FORMATS

    if not directory.best_path.exists():
        return None
    document = read_yaml_mapping(directory.best_path)
    folder = directory.path / "exports"
    folder.mkdir(exist_ok=True)
    for name in FORMATS:
        text = _exported(document, name, mcore_version(), directory)
        if text is not None:
            (folder / f"{name}.{_SUFFIXES.get(name, 'txt')}").write_text(text, encoding="utf-8")
    return folder


def _exported(
    document: Mapping[str, Any], to: str, mcore: str, directory: StudyDirectory
) -> str | None:
    from tuner.formats import export_document

    try:
        exported = export_document(
            document,
            to,
            mcore=mcore,
            where=str(directory.best_path),
            base_folder=directory.job_folder,
        )
    except InputError as error:
        _LOG.warning("the best candidate has no form %s: %s", to, error)
        return None
    return exported.text
