"""Worker: one JSON question a line, one answer a line, asked of the real packages.

``{"arguments": [...]}`` goes through Megatron-LM's parser, ``validate_args`` and the functions that
make its configuration objects. ``{"base": {...}, "overrides" | "yaml" | "python": ...}`` is applied
to the real ``ConfigContainer`` of Megatron Bridge through its own override code. The answer maps
``part.field`` to what is held; ``{"error": ...}`` says what the package raised.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import logging
import os
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

from constraint_oracle import groups, stubs, values
from constraint_oracle.asker import environment

TRAINING_STUBS = ("wandb", "nvidia_resiliency_ext", "modelopt", "regex", "datasets")
TRAINING_STUBS += ("transformers", "tiktoken", "sentencepiece", "megatron.legacy")
TRAINING_STUBS += ("multistorageclient", "torchvision")
REAL = ("omegaconf", "hydra")


class MegatronLM:
    """The command line of Megatron-LM; ``folder`` is its ``megatron/training``."""

    def __init__(self, folder: str) -> None:
        import megatron.core  # noqa: F401

        package = types.ModuleType("megatron.training")
        package.__path__ = [folder]
        sys.modules["megatron.training"] = package
        for name in ("get_args", "get_timers", "get_adlr_autoresume", "get_tokenizer"):
            setattr(package, name, lambda: None)
        for name in ("get_num_microbatches", "print_rank_0", "is_last_rank"):
            setattr(package, name, lambda *_: None)
        from megatron.training import arguments

        self.module = arguments
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        arguments.add_megatron_arguments = lambda _: parser  # building it takes a second
        self.makers = _functions(folder, "get_megatron_ddp_config", "get_megatron_optimizer_config")
        self.actions = [one for one in parser._actions if one.dest != "help"]

    def table(self) -> dict[str, Any]:
        """Every option of the parser: ``{destination: [[flags, kind, default, choices], ...]}``."""
        kinds = {
            "_StoreTrueAction": "true",
            "_StoreFalseAction": "false",
            "BooleanOptionalAction": "switch",
        }
        table: dict[str, Any] = {}
        for one in self.actions:
            several = "values" if one.nargs not in (None, 0) else "value"
            default = getattr(one.default, "name", one.default)
            choices = [str(getattr(choice, "name", choice)) for choice in one.choices or ()]
            kind = kinds.get(type(one).__name__, several)
            row = [list(one.option_strings), kind, default, choices]
            table.setdefault(one.dest, []).append(row)
        return table

    def held(self, question: dict[str, Any]) -> dict[str, Any]:
        sys.argv = ["pretrain_gpt.py", *question["arguments"]]
        os.environ["WORLD_SIZE"] = str(question["world_size"])
        os.environ["RANK"] = "0"
        os.environ["LOCAL_RANK"] = "0"
        arguments = self.module
        args = arguments.parse_args()
        arguments.validate_args(args)
        model = arguments.core_transformer_config_from_args(args)
        parts = {"args": args, "model": model}
        if "get_megatron_ddp_config" in self.makers:
            parts["ddp"] = self.makers["get_megatron_ddp_config"](args)
        if "get_megatron_optimizer_config" in self.makers:
            made = self.makers["get_megatron_optimizer_config"](args)
            parts["optimizer"] = made[0] if isinstance(made, tuple) else made
        return _held(parts)


def _functions(folder: str, *names: str) -> dict[str, Any]:
    """Functions of training.py by themselves: importing the module needs a GPU's packages."""
    import torch
    from megatron.core import distributed, optimizer

    tree = ast.parse((Path(folder) / "training.py").read_text())
    tree.body = [one for one in tree.body if getattr(one, "name", None) in names]
    scope = {**vars(optimizer), **vars(distributed), "dataclasses": dataclasses, "Any": Any}
    scope |= {"argparse": argparse, "torch": torch}
    exec(compile(tree, "training.py", "exec"), scope)
    return {name: scope[name] for name in names if name in scope}


class Bridge:
    """The container of Megatron Bridge, with its real override code."""

    def __init__(self, world: groups.World) -> None:
        from constraint_oracle import bridge_stages

        bridge_stages.prepare(world)
        self.stages = bridge_stages

    def held(self, question: dict[str, Any]) -> dict[str, Any]:
        container = self.stages._build_container(
            self.stages.BridgeCandidate(question["base"]),
        )
        container.dataset = _dataset()
        container.mixed_precision = "bf16_mixed"
        if "python" in question:
            scope: dict[str, Any] = {}
            exec(compile(question["python"], "exported.py", "exec"), scope)
            container = scope["apply"](container)
        else:
            container = _overridden(container, question)
        parts = ("model", "ddp", "optimizer", "train", "dataset", "dist", "rng")
        parts += ("rerun_state_machine", "checkpoint", "comm_overlap")
        held = _held({part: getattr(container, part) for part in parts})
        held["mixed_precision"] = values.to_json(container.mixed_precision)
        held["comm_overlap"] = type(container.comm_overlap).__name__
        self._validate(container)
        return held

    def _validate(self, container: Any) -> None:
        """Upstream's own checks, which a job runs before it starts."""
        from megatron.bridge.training.config import runtime_config_update

        container.dataset = None  # its only check is that its sequence length is the model's
        runtime_config_update(container)


def _dataset() -> Any:
    from megatron.bridge.training.config import GPTDatasetConfig

    return GPTDatasetConfig(
        seq_length=64,
        random_seed=1,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )


def _overridden(container: Any, question: dict[str, Any]) -> Any:
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    if "overrides" in question:
        return process_config_with_overrides(container, cli_overrides=question["overrides"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exported.yaml"
        path.write_text(question["yaml"])
        return process_config_with_overrides(container, config_filepath=str(path))


def _held(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{part}.{name}": _shown(name, value)
        for part, holder in parts.items()
        if holder is not None
        for name, value in _fields(holder)
    }


def _shown(name: str, value: Any) -> Any:
    """The value as JSON; a name left as text where the package needs an object is marked."""
    is_object = name in ("attention_backend", "activation_func")
    is_object |= name.endswith("_dtype") and name != "moe_router_dtype"
    return f"text {value}" if is_object and isinstance(value, str) else values.to_json(value)


def _fields(holder: Any) -> list[tuple[str, Any]]:
    if dataclasses.is_dataclass(holder):
        names = [one.name for one in dataclasses.fields(holder)]
        names += ["seq_length"] if hasattr(holder, "seq_length") else []
        return [(name, getattr(holder, name)) for name in names if hasattr(holder, name)]
    return list(vars(holder).items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron-lm", help="folder of megatron/training; else Megatron Bridge")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr
    packages = set(stubs.STUBBED_FOR_MCORE)
    if arguments.megatron_lm:
        packages.update(TRAINING_STUBS)
    else:
        from constraint_oracle import bridge_stages

        packages.update(bridge_stages.STUBBED)
        packages.difference_update(REAL)
    finder = stubs.install(sorted(packages))
    gpu, world = stubs.Gpu(), groups.World()
    gpu.install()
    world.install()
    asked = MegatronLM(arguments.megatron_lm) if arguments.megatron_lm else Bridge(world)
    for line in sys.stdin:
        question = json.loads(line)
        answers.write(json.dumps(_answer(asked, question, finder, gpu, world)) + "\n")
        answers.flush()


def _answer(asked: Any, question: dict[str, Any], finder: Any, gpu: Any, world: Any) -> Any:
    if question.get("table"):
        return asked.table()
    gpu.name = question.get("gpu") or stubs.DEFAULT_GPU
    world.size = question["world_size"]
    try:
        with (
            environment(question.get("env") or {}),
            stubs.transformer_engine(finder, question.get("te_version")),
        ):
            return asked.held(question)
    except (Exception, SystemExit) as refused:
        return {"error": f"{type(refused).__name__}: {refused}"}


if __name__ == "__main__":
    main()
