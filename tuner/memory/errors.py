"""What the memory model cannot answer, said by name."""

from __future__ import annotations

from tuner.errors import InputError


class UnsupportedError(InputError):
    """A combination the memory model does not cover; `field` names the setting in the way."""


class RefusedError(InputError):
    """What Megatron-Core itself does not run; the message says so and repeats its own."""
