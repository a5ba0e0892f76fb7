"""What a record says of the run behind it."""

from __future__ import annotations

from tuner.candidate import Candidate
from tuner.search.records import TrialRecord

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def record(own, **evidence) -> TrialRecord:
    candidate = Candidate.from_flat({"micro_batch_size": 2, "env": own})
    return TrialRecord(3, candidate, "completed", "", 1.0, None, evidence=evidence)


def test_what_ran_has_the_variables_that_a_retry_added() -> None:
    ran = record({"NCCL_DEBUG": "INFO"}, env=EXPANDABLE).ran
    assert ran.to_flat()["env"] == {"NCCL_DEBUG": "INFO", **EXPANDABLE}
    assert ran.micro_batch_size == 2


def test_what_ran_at_once_is_the_candidate() -> None:
    plain = record({"NCCL_DEBUG": "INFO"})
    assert plain.ran is plain.candidate
