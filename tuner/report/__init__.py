"""One self-contained HTML page for a study or a plan: no network, no other files."""

from tuner.report.hand_over import HandOver, hand_over
from tuner.report.page import render, write_page
from tuner.report.plan import write_plan_report
from tuner.report.study import study_report
from tuner.report.terminal import print_short

__all__ = [
    "HandOver",
    "hand_over",
    "print_short",
    "render",
    "study_report",
    "write_page",
    "write_plan_report",
]
