"""Errors of trainables that name what is wrong with a trial's description."""

from __future__ import annotations


class TrialSpecError(ValueError):
    """A trial asks for something that cannot run; the message names the field and the way out."""
