"""Exports applied to the real parsers and configuration objects give the candidate's values."""

from __future__ import annotations

import itertools
import json
import warnings
from importlib.resources import files

import pytest
from constraint_oracle import wheels
from export_oracle.client import training_folder, worker
from export_oracle.roundtrip import (
    BRIDGE_FORMATS,
    Outcome,
    through_bridge,
    through_megatron_lm,
    valid_candidates,
)

SEED = 20263
CANDIDATES = 25


def _require(mcore: str, *, bridge: bool) -> None:
    try:
        wheels.unpacked("megatron-core", mcore)
        if bridge:
            wheels.unpacked("megatron-bridge", wheels.BRIDGE_OF_MCORE[mcore])
    except wheels.WheelUnavailableError as missing:
        warnings.warn(f"NOT PROVED against Megatron-Core {mcore}: {missing}", stacklevel=1)
        pytest.skip(f"wheels of Megatron-Core {mcore} cannot be fetched: {missing}")


def _assert_exact(outcomes: list[Outcome]) -> None:
    wrong = [found for outcome in outcomes for found in outcome.wrong]
    refused = [found for outcome in outcomes for found in outcome.refused]
    assert not wrong, wrong[0]
    assert not refused, refused[0]
    assert sum(outcome.fields for outcome in outcomes) > 10 * len(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("mcore", ["0.17.0", "0.19.2"])
def test_megatron_lm_takes_the_arguments_and_holds_the_candidate(mcore: str) -> None:
    _require(mcore, bridge=False)
    with worker(mcore, training_folder(mcore)) as ask:
        candidates = itertools.islice(valid_candidates(SEED, mcore, "megatron-lm"), CANDIDATES)
        _assert_exact([through_megatron_lm(ask, *one, mcore) for one in candidates])
        _compare_table(ask({"table": True}), mcore)


def _compare_table(real: dict, mcore: str) -> None:
    """The shipped table of options is that of the real parser."""
    shipped = json.loads(
        (files("tuner.formats") / "data" / "megatron_arguments.json").read_text("utf-8")
    )
    for dest, rows in real.items():
        known = [row for row in shipped[dest] if mcore in row["versions"]]
        assert [(row["flags"], row["kind"]) for row in known] == [
            (flags, kind) for flags, kind, _, _ in rows
        ], dest
    here = {dest for dest, rows in shipped.items() if any(mcore in r["versions"] for r in rows)}
    assert here == set(real)


@pytest.mark.slow
@pytest.mark.parametrize("mcore", ["0.16.1", "0.18.0"])
def test_bridge_applies_every_form_and_holds_the_candidate(mcore: str) -> None:
    _require(mcore, bridge=True)
    with worker(mcore) as ask:
        for flat, rewrites in itertools.islice(valid_candidates(SEED, mcore, "bridge"), CANDIDATES):
            _assert_exact([through_bridge(ask, flat, rewrites, mcore, to) for to in BRIDGE_FORMATS])
