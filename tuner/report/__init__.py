"""One self-contained HTML page for a study or a plan: no network, no other files."""

from tuner.report.page import render
from tuner.report.study import study_report

__all__ = ["render", "study_report"]
