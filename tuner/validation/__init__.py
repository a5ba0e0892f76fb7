"""Estimates against measured runs: published figures read as launches, estimated, compared."""

from tuner.validation.validate import validate

__all__ = ["validate"]
