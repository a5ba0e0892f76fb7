"""Public bug reports about invalid or crashing combinations get the right verdict and a fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.constraints import MCORE_VERSIONS, check

DATA = Path(__file__).parents[2] / "data" / "constraints" / "issues.jsonl"
REPORTS = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
# The packages accept this configuration and crash while the optimizer is built.
CRASHES_LATER = "Megatron-LM/issues/5083"


def frontend(report: dict) -> str:
    return "megatron-lm" if report["frontend"] == "lm" else report["frontend"]


def name(report: dict) -> str:
    return "/".join(report["link"].split("/")[-3:])


@pytest.mark.parametrize("report", REPORTS, ids=name)
@pytest.mark.parametrize("version", MCORE_VERSIONS)
def test_report_gets_the_verdict_of_the_real_packages(report, version):
    result = check(report["config"], mcore=version, frontend=frontend(report))
    accepted = report["oracle"][version] == "valid"
    if report["link"].endswith(CRASHES_LATER):
        assert not result.valid
    else:
        assert result.valid == accepted


@pytest.mark.parametrize("report", REPORTS, ids=name)
@pytest.mark.parametrize("version", MCORE_VERSIONS)
def test_refused_report_has_a_fix_that_works(report, version):
    result = check(report["config"], mcore=version, frontend=frontend(report))
    for error in result.errors:
        assert error.fix
        fixed = {**report["config"], **error.fix}
        assert check(fixed, mcore=version, frontend=frontend(report)).valid


WORKAROUNDS = [report for report in REPORTS if report["verdict"] == "needs workaround"]


@pytest.mark.parametrize("report", WORKAROUNDS, ids=name)
def test_report_that_needs_a_workaround_names_one(report):
    for version in MCORE_VERSIONS:
        result = check(report["config"], mcore=version, frontend=frontend(report))
        assert any(v.kind in ("error", "advice") and v.fix for v in result.violations)


def test_local_graph_with_expandable_segments_is_fine_on_blackwell():
    (report,) = [r for r in REPORTS if r["link"].endswith("issues/5474")]
    assert check({**report["config"], "gpu": "b200"}).valid
