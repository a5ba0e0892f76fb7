"""Worker: one JSON question a line, answered by the real recipes of one Megatron Bridge release.

``{"spec": {...}, "world_size": N, "fields": [...]}`` loads the recipe the spec names, makes it the
trial, lets Bridge validate it, runs the recorder through Bridge's callback manager, and answers
with what is held.
Only what would fetch a model's configuration from a hub is replaced, by one with the same numbers.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import types
import warnings
from typing import Any

from constraint_oracle import bridge_stages, groups, stubs

REAL = ("omegaconf", "hydra")
MORE_STUBS = ("tensorboard", "torch.utils.tensorboard", "flask", "uvicorn", "fastapi")
LIBRARY_RECIPE = "llama32_1b_pretrain_config"
LLAMA_1B = {
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 64,
    "vocab_size": 128256,
    "seq_length": 8192,
}


class LocalBridge:
    """In place of `AutoBridge`: a provider of known numbers for whatever model is named."""

    @classmethod
    def from_hf_pretrained(cls, name: str, **_: Any) -> LocalBridge:
        return cls()

    from_hf_config = from_hf_pretrained

    def to_megatron_provider(self, load_weights: bool = True) -> Any:
        from megatron.bridge.models.gpt_provider import GPTModelProvider

        return GPTModelProvider(**LLAMA_1B)


def prepare() -> groups.World:
    stubbed = {*stubs.STUBBED_FOR_MCORE, *bridge_stages.STUBBED, *MORE_STUBS}
    stubs.install(sorted(stubbed - set(REAL)))
    world = groups.World()
    stubs.Gpu().install()
    bridge_stages.prepare(world)
    sys.modules["megatron.bridge"].AutoBridge = LocalBridge
    _import_one_family_only()
    return world


def _import_one_family_only() -> None:
    """The package of all recipes with those of one family: others need packages of their own."""
    name = "megatron.bridge.recipes"
    package = types.ModuleType(name)
    package.__path__ = [f"{folder}/recipes" for folder in sys.modules["megatron.bridge"].__path__]
    sys.modules[name] = sys.modules["megatron.bridge"].recipes = package
    family = importlib.import_module(f"{name}.llama")
    vars(package)[LIBRARY_RECIPE] = getattr(family, LIBRARY_RECIPE)


def answer(question: dict[str, Any], world: groups.World) -> dict[str, Any]:
    import megatron.core
    from megatron.bridge.training import callbacks, config

    from trainables.megatron_bridge.callback import MeasuredEnough, StepRecorder
    from trainables.megatron_bridge.rank import _flops, _registered
    from trainables.megatron_bridge.recipe import load_recipe, missing_environment
    from trainables.megatron_bridge.settings import configure
    from tuner.measurement import TrialSpec

    world.size = question["world_size"]
    spec = TrialSpec.from_json(question["spec"])
    container = load_recipe(spec.options["recipe"])
    environment = missing_environment(container, spec.config.get("env") or {}, {})
    warmup = configure(container, spec, megatron.core.__version__)
    config.runtime_config_update(container)

    class Meter:
        calls = 0

        def synchronize(self) -> None:
            self.calls += 1

        def start(self) -> None:
            self.calls = 0

    meter = Meter()
    recorder = StepRecorder(meter, warmup_steps=warmup, measure_steps=spec.measure_steps)
    manager = callbacks.normalize_callbacks(_registered(recorder))
    context = callbacks.CallbackContext(state=None, model=[], loss_dict={"lm loss": 2.0})
    manager.fire("on_train_start", context)
    steps = 0
    try:
        while steps < container.train.train_iters:
            manager.fire("on_train_step_start", context)
            steps += 1
            manager.fire("on_train_step_end", context)
    except MeasuredEnough:
        ended = True
    else:
        ended = False
    held = {path: _held(container, path) for path in question["fields"]}
    return {
        "held": held,
        "environment": environment,
        "warmup": warmup,
        "steps": steps,
        "ended": ended,
        "losses": recorder.losses,
        "measured": len(recorder.step_times_s),
        "synchronisations": meter.calls,
        "flops": _flops(container, spec),
    }


def _held(container: Any, path: str) -> Any:
    section, _, name = path.partition(".")
    return getattr(getattr(container, section), name, "absent")


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr
    world = prepare()
    for line in sys.stdin:
        try:
            found = answer(json.loads(line), world)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
