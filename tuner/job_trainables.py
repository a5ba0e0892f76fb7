"""Sections of the job file that say how the trainables `megatron_bridge` and `command` are run.

Whatever ends up in a command line, an environment or a path is checked here, where it comes in.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_OVERRIDE = re.compile(rf"(?:\+\+|\+)?({_NAME}(?:\.{_NAME})*)=(.*)", re.DOTALL)
_TARGET = re.compile(r"_target_['\"]?\s*[:=]\s*['\"]?([\w.]*)")
_KNOWN_TARGETS = ("megatron.", "torch.")


def _without_control_characters(text: str) -> str:
    if any((ord(char) < 32 and char != "\t") or ord(char) == 127 for char in text):
        raise ValueError("holds a control character")
    return text


def _override(text: str) -> str:
    """`path=value` as Megatron Bridge's override parser takes it; `~` (deletion) is refused."""
    if _OVERRIDE.fullmatch(_without_control_characters(text)) is None:
        raise ValueError("is no override; write section.field=value")
    for target in _TARGET.findall(text):
        if not target.startswith(_KNOWN_TARGETS):
            raise ValueError(
                f"would call {target!r}; only names of megatron and torch may be instantiated"
            )
    return text


def _pattern(text: str) -> str:
    from trainables.logs import LogPatternError, log_pattern

    try:
        log_pattern(text)
    except LogPatternError as error:
        raise ValueError(str(error)) from None
    return text


def _argument(text: str) -> str:
    from trainables.command.template import TemplateError, placeholders

    try:
        placeholders(text)
    except TemplateError as error:
        raise ValueError(str(error)) from None
    return text


Word = Annotated[str, Field(max_length=10_000), AfterValidator(_without_control_characters)]
Argument = Annotated[Word, AfterValidator(_argument)]
Override = Annotated[str, Field(max_length=10_000), AfterValidator(_override)]
Pattern = Annotated[str, Field(max_length=2_000), AfterValidator(_pattern)]
Environment = dict[Annotated[str, Field(pattern=rf"^{_NAME}$", max_length=200)], Word]
RecipeName = Annotated[
    str, Field(pattern=rf"^(?:{_NAME}(?:\.{_NAME})*:)?{_NAME}$", min_length=1, max_length=300)
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def options(self) -> dict[str, Any]:
        """What the trainable gets of this section, as JSON values."""
        return self.model_dump(mode="json")


class Bridge(_Section):
    """What the trainable `megatron_bridge` runs."""

    recipe: RecipeName = Field(
        description="A pretraining recipe of megatron.bridge.recipes or .perf_recipes by function "
        "name, or an own one as 'package.module:function'. It decides the architecture, which "
        "must be that of the job's `model`."
    )
    overrides: list[Override] = Field(
        default_factory=list,
        description="Overrides besides the candidate's, as 'section.field=value'.",
    )
    environment: Environment = Field(
        default_factory=dict,
        description="Environment of the ranks; it wins over the recipe's, a candidate's over it.",
    )
    step: Literal["gpt_step", "vlm_step", "llava_step", "audio_lm_step"] = Field(
        "gpt_step", description="Module of megatron.bridge.training with the forward step."
    )


class Command(_Section):
    """What the trainable `command` runs."""

    launch: list[Argument] = Field(
        min_length=1,
        max_length=1_000,
        description="The command as a list of arguments, without a shell. {NAME} stands for a "
        "Megatron field of the candidate or a fact of the trial ({nnodes}, {node_rank}, "
        "{ranks_per_node}, {master_addr}, {master_port}, {steps}, {output_dir}, ...), {NAME|TEXT} "
        "gives what stands where the field is unset; {megatron_args} and {bridge_overrides} alone "
        "are all options of the candidate.",
    )
    per: Literal["node", "rank"] = Field(
        "node",
        description="'node' runs the command once on every node (it starts the node's ranks "
        "itself, as torchrun does), 'rank' once per rank with torch's environment set.",
    )
    log: Literal["megatron"] | list[Pattern] = Field(
        "megatron",
        description="How figures are read from the output: 'megatron' for the lines that "
        "Megatron-LM and Megatron Bridge print, or regular expressions with the groups "
        "step_time_s or step_time_ms, and any of iteration, loss, tflops_per_gpu, rank, "
        "allocated_UNIT, reserved_UNIT (bytes, kb, kib, mb, mib, gb, gib).",
    )
    environment: Environment = Field(
        default_factory=dict, description="Environment of the command besides the candidate's."
    )
    working_directory: Word | None = Field(
        None, description="Where the command runs; unset: the folder of the trial."
    )
