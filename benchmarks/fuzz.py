"""Malformed input of every kind that users hand in: an answer or one clear line, never a traceback.

    python benchmarks/fuzz.py --inputs 100000
    python benchmarks/fuzz.py --kind job --inputs 2000 --seed 7

Job files, configurations (override lists, YAML, command lines), logs and Hugging Face
configurations are made by changing good ones: values replaced, keys misspelt and doubled, text cut,
spliced and filled with other characters. An input passes where the reader gives a result or raises
its own input error on one line, writes nothing outside the folder it was given, and takes less than
`SLOW_S` processor seconds. Prints one JSON summary; exits 1 where any input failed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SLOW_S = 5.0
_SHOWN = 20

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), "", " ", "null", "~", "1e5", "0x10", "1_000", "NaN", "yes"),
    *("../../etc/passwd", "/etc/passwd", "a/b", "..", ".", "con\0nul", "x" * 5000, "é\u202e\ud7ff"),
    *(
        "{{}}",
        "{nnodes",
        "{}",
        "%s%n",
        "$(touch /tmp/x)",
        "`id`",
        "; rm -rf /",
        "!!python/object:x",
    ),
    *("(?P<step_time_s>(a+)+)$", "(", "[0-9", "tt|tt", "E|t*999999|L", "expandable_segments:True"),
    *([], [None], [[]], [1, "a", None], {}, {"a": {}}, {"values": []}, {"when": {"x": 1}}),
    *({"values": [1, 2], "when": {"pipeline_model_parallel_size": [2]}}, {"subsets": ["a"] * 30}),
)
"""Values that stand where others belong."""

_CHARACTERS = "\x00\t\n\r \"'\\{}[]():,&*!|>%@`#-=+~$;?<éß中\u200b\u2028😀\x1b\x7f\ufeff0aZ_"


@dataclass(slots=True)
class Tally:
    """What became of the inputs of one kind."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)


class Guard:
    """Sees every file this process opens for writing, makes, renames or removes."""

    _WRITES = frozenset(("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink"))
    _STARTS = frozenset(("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"))

    def __init__(self) -> None:
        self.allowed: Path | None = None
        self.strays: list[str] = []
        sys.addaudithook(self._see)

    @contextmanager
    def only(self, folder: Path) -> Iterator[None]:
        """Inside, everything outside of `folder` that is touched is noted in `strays`."""
        self.allowed, self.strays = folder, []
        try:
            yield
        finally:
            self.allowed = None

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event in self._STARTS:
            self.strays.append(f"{event} {arguments[0]!r}")
        elif event in self._WRITES or (event == "open" and _writes(arguments)):
            for path in arguments[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
                self._note(event, path)

    def _note(self, event: str, path: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        place = os.path.realpath(os.fsdecode(path))
        if not place.startswith(f"{self.allowed}{os.sep}") and "__pycache__" not in place:
            self.strays.append(f"{event} {place}")


def _writes(arguments: tuple[Any, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def changed_value(value: Any, random: Random) -> Any:
    """A copy of a JSON-like value with one to three changes somewhere inside."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = _with_one_change(value, random)
    return value


def _with_one_change(value: Any, random: Random) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        choice = random.random()
        if choice < 0.1:
            del value[key]
        elif choice < 0.2:
            value[changed_text(str(key), random)] = value.pop(key)
        elif choice < 0.3:
            value[random.choice(("extra", "", "model", "name", "env.A=B"))] = random.choice(JUNK)
        else:
            value[key] = _with_one_change(value[key], random)
        return value
    if isinstance(value, list) and value and random.random() < 0.7:
        at = random.randrange(len(value))
        value[at] = _with_one_change(value[at], random)
        return value
    if isinstance(value, str) and random.random() < 0.5:
        return changed_text(value, random)
    if isinstance(value, int) and random.random() < 0.4:
        return random.choice(
            (
                value + 1,
                -value,
                value * 10**9,
                value / 2 if abs(value) < 2**60 else 0,
                repr(value)[:99],
            )
        )
    return copy.deepcopy(random.choice(JUNK))


def changed_text(text: str, random: Random) -> str:
    """A text with one to four changes of characters, cuts or repeats."""
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(text))
        end = min(len(text), at + random.choice((1, 1, 2, 8, 200)))
        choice = random.randrange(6)
        if choice == 0:
            text = (
                text[:at] + random.choice(_CHARACTERS) * random.choice((1, 1, 3, 300)) + text[at:]
            )
        elif choice == 1:
            text = text[:at] + text[end:]
        elif choice == 2:
            text = text[:end] + text[at:]
        elif choice == 3:
            text = text[:at] + random.choice(_CHARACTERS) + text[end:]
        elif choice == 4:
            text = text[:at] + str(random.choice(JUNK)) + text[end:]
        else:
            text = text[:at] if random.random() < 0.5 else text[at:]
    return text


class Fuzzer:
    """Makes inputs of each kind and hands them to what reads such input."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = Random(seed)
        self._jobs = [path.read_text() for path in sorted(_JOBS.glob("*.yaml"))]
        self._logs = [path.read_text() for path in sorted(_LOGS.glob("*.log"))]
        self._models = list(_hugging_face_configs())

    def job(self) -> Callable[[], object]:
        """A job file: read, checked, its space made, its study directory created."""
        import yaml

        from tuner.job import load_job
        from tuner.study_dir import create_study_directory, free_path

        text = self._random.choice(self._jobs)
        if self._random.random() < 0.7:
            text = yaml.safe_dump(_plain(changed_value(yaml.safe_load(text), self._random)))
        else:
            text = changed_text(text, self._random)
        path = self._folder / "job.yaml"
        path.write_text(text, errors="replace")

        def read() -> None:
            job = load_job(path)
            space = job.search_space(self._folder)
            space.combinations()
            list(space.points(5, Random(0)))
            create_study_directory(free_path(self._folder / "studies", job.name), path)

        return read

    def overrides(self) -> Callable[[], object]:
        """Settings in any form: read, put in canonical form, written in any form."""
        from tuner.candidate import Candidate
        from tuner.constraints import check
        from tuner.formats import FORMATS, export_document
        from tuner.formats.reader import expand, read_configuration

        text = changed_text(self._random.choice(_SETTINGS), self._random)
        form, mcore = self._random.choice(FORMATS), self._random.choice(("0.16", "0.17", "0.19"))

        def read() -> None:
            document = read_configuration(text, mcore=mcore)
            document = expand(document, mcore=mcore, where="x", base=self._folder, effective=False)
            config = document.get("config", document)
            if isinstance(config, dict) and check(config, mcore=mcore, fixes=False).valid:
                Candidate.from_flat(config).label(8)
            export_document(document, form, mcore=mcore)

        return read

    def log(self) -> Callable[[], object]:
        """A log: diagnosed, read for figures, redacted."""
        from trainables.logs import MEGATRON_PATTERNS, LogReader
        from tuner.diagnose import diagnose
        from tuner.redaction import redact

        text = changed_text(self._random.choice(self._logs), self._random)
        if self._random.random() < 0.3:
            text += changed_text(self._random.choice(self._logs), self._random)

        def read() -> None:
            json.dumps(diagnose(text, mcore="0.16.1").to_json())
            reader = LogReader(MEGATRON_PATTERNS)
            for line in text.splitlines():
                reader.feed(line)
            redact(text)

        return read

    def model(self) -> Callable[[], object]:
        """A Hugging Face configuration: read, counted, and written as fields."""
        from tuner.models import from_hf_config, model_flops_per_step

        document = changed_value(self._random.choice(self._models), self._random)
        text = json.dumps(document)
        if self._random.random() < 0.3:
            text = changed_text(text, self._random)
        path = self._folder / "config.json"
        path.write_text(text, errors="replace")

        def read() -> None:
            model = from_hf_config(path)
            model_flops_per_step(model, 4096, 8)
            json.dumps(model.to_flat())

        return read


_JOBS = ROOT / "search_spaces" / "jobs"
_LOGS = ROOT / "tests" / "data" / "logs"
_SETTINGS = (
    "model.tensor_model_parallel_size=4 model.recompute_modules=[core_attn,mlp] "
    "++comm_overlap.tp_comm_overlap=true train.micro_batch_size=2 ddp.overlap_grad_reduce=false",
    "torchrun --nproc-per-node 8 run_recipe.py --recipe llama3_8b_pretrain_config -tp 4 -pp 2 "
    "model.sequence_parallel=true 'model.pipeline_model_parallel_layout=\"Et*4|t*4L\"'",
    "#!/bin/bash\nexport NCCL_DEBUG=INFO\nTP=${TP:-4}\nARGS=(\n  --num-layers 32\n"
    "  --tensor-model-parallel-size $TP\n  --recompute-granularity selective\n)\n"
    'torchrun --nproc_per_node=8 pretrain_gpt.py "${ARGS[@]}" --bf16 --micro-batch-size 1\n',
    "model: llama3-8b\nworld_size: 8\nseq_length: 4096\nglobal_batch_size: 64\nconfig:\n"
    "  tensor_model_parallel_size: 2\n  sequence_parallel: true\n  micro_batch_size: 1\n"
    "  recompute_granularity: full\n  recompute_method: uniform\n  recompute_num_layers: 1\n"
    "  env: {PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True'}\n",
    "model:\n  tensor_model_parallel_size: 4\n  cuda_graph_impl: local\n"
    "train: {micro_batch_size: 1, global_batch_size: 128}\nddp: {overlap_grad_reduce: true}\n",
)


def _hugging_face_configs() -> Iterator[dict[str, Any]]:
    """Configurations of the families that are read, as their authors write them."""
    common = {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 32000,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    yield {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **common}
    yield {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **common,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    }
    yield {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **common}
    yield {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **common,
        "head_dim": 128,
    }
    yield {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        **common,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    yield {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        **common,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    }


def _plain(value: Any) -> Any:
    """What a YAML file can hold of a value: control characters and the like as they come."""
    return json.loads(json.dumps(value, default=str))


KINDS = ("job", "overrides", "log", "model")


def fuzz(kind: str, inputs: int, seed: int, folder: Path, guard: Guard) -> Tally:
    """Make and read `inputs` inputs of one kind."""
    from tuner.errors import EnvironmentLacksError, InputError
    from tuner.models.errors import ModelSpecError

    refusals = (InputError, ModelSpecError, EnvironmentLacksError)
    fuzzer, tally = Fuzzer(folder, seed), Tally()
    with contextlib.suppress(*refusals):
        getattr(fuzzer, kind)()()  # imports are not what is timed
    for number in range(inputs):
        read = getattr(fuzzer, kind)()
        started = time.process_time()
        problem = ""
        with guard.only(folder):
            try:
                read()
                tally.accepted += 1
            except refusals as error:
                tally.refused += 1
                if len(str(error).splitlines()) != 1:
                    problem = f"not one line: {error!r}"
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                problem = "".join(traceback.format_exception(error)[-4:])
        seconds = time.process_time() - started
        tally.inputs += 1
        tally.slowest_s = max(tally.slowest_s, seconds)
        if guard.strays:
            problem += f" touched {guard.strays[:3]}"
        if seconds > SLOW_S:
            problem += f" took {seconds:.1f} s"
        if problem:
            tally.failures.append({"number": str(number), "problem": problem[-1500:]})
    return tally


def summary(tallies: dict[str, Tally], seed: int, command: str) -> dict[str, Any]:
    """The JSON document: counts by kind, and the failures by their last line."""
    return {
        "benchmark": "fuzz",
        "command": command,
        "seed": seed,
        "inputs": sum(tally.inputs for tally in tallies.values()),
        "failed": sum(len(tally.failures) for tally in tallies.values()),
        "kinds": {
            kind: {
                "inputs": tally.inputs,
                "accepted": tally.accepted,
                "refused": tally.refused,
                "failed": len(tally.failures),
                "slowest_s": round(tally.slowest_s, 3),
                "by_problem": dict(
                    Counter(
                        f["problem"].strip().splitlines()[-1][:200] for f in tally.failures
                    ).most_common(_SHOWN)
                ),
            }
            for kind, tally in tallies.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these kinds")
    parser.add_argument("--show", action="store_true", help="print the first failures in full")
    arguments = parser.parse_args()
    kinds = arguments.kind or list(KINDS)
    guard, tallies = Guard(), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "studies").mkdir()
        for kind in kinds:
            tallies[kind] = fuzz(
                kind, arguments.inputs // len(kinds), arguments.seed, folder, guard
            )
            if arguments.show:
                for failure in tallies[kind].failures[:5]:
                    print(kind, failure["number"], failure["problem"], file=sys.stderr)
    command = shlex.join(["python", "benchmarks/fuzz.py", *sys.argv[1:]])
    print(json.dumps(summary(tallies, arguments.seed, command), indent=1))
    return 1 if any(tally.failures for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
