"""Reads training logs: what happened, the evidence, and the fix as a change of the candidate."""

from tuner.diagnose.diagnosis import UNKNOWN, Diagnosis, Finding
from tuner.diagnose.engine import diagnose

__all__ = ["UNKNOWN", "Diagnosis", "Finding", "diagnose"]
