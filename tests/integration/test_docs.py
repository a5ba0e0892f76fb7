"""The documentation builds, and the commands in it are commands of the CLI that do what is said."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer

from tuner.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICK = {"check", "diagnose", "doctor", "export", "job-schema", "models"}
"""Commands that are run for real, on the files below; the others are read by the CLI."""


def commands() -> list[tuple[str, str]]:
    """(page, command) of every line in a code block that calls `tuner`."""
    found = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            text = line.strip().strip("$ ")
            call = re.search(r"(?:^|\| )(tuner (?!tune[rd])[a-z].*)", text)
            if call and (line.startswith("    ") or text == line.strip()) and "`" not in text:
                found.append((page.name, call.group(1)))
    return list(dict.fromkeys(found))


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)[1:]


COMMANDS = commands()


def resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these words name, and its arguments."""
    found, rest = typer.main.get_command(app), list(words)
    while rest and hasattr(found, "commands"):
        found = found.commands[rest.pop(0)]
    return found, rest


def test_the_documentation_shows_every_command() -> None:
    shown = {words_of(command)[0] for _, command in COMMANDS}
    assert shown >= set(typer.main.get_command(app).commands)


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda value: str(value)[:60])
def test_the_cli_takes_every_documented_command(page: str, command: str) -> None:
    found, arguments = resolve(words_of(command))
    found.make_context("tuner", arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The files that the documentation speaks of."""
    path = tmp_path_factory.mktemp("docs")
    config = "{tensor_model_parallel_size: 4, sequence_parallel: true, micro_batch_size: 1}"
    shape = "model: llama3-8b\nworld_size: 8\nseq_length: 4096\nglobal_batch_size: 64\n"
    text = f"{shape}config: {config}\n"
    for name in ("config.yaml", "best.yaml", "studies/NAME/best.yaml"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    for name in ("my-job", "cpu-quickstart"):
        (path / "studies" / name).mkdir()
        (path / "studies" / name / "best.yaml").write_text(text)
    (path / "launch.sh").write_text(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
        "--num-attention-heads 32 --ffn-hidden-size 14336 --seq-length 4096 "
        "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 "
        "--tensor-model-parallel-size 4 --sequence-parallel\n"
    )
    (path / "candidates.jsonl").write_text(
        '{"model": "llama3-8b", "world_size": 8, "config": {"tensor_model_parallel_size": 2}}\n'
    )
    logs = ROOT / "tests" / "data" / "logs"
    (path / "train.log").write_bytes((logs / "oom_capacity_forward.log").read_bytes())
    (path / "logs").mkdir()
    (path / "logs" / "rank3.log").write_bytes((logs / "nccl_timeout.log").read_bytes())
    return path


RUN = sorted(
    {
        command
        for _, command in COMMANDS
        if words_of(command)[0] in QUICK and not {"-", "--tracking-uri"} & set(words_of(command))
    }
)


@pytest.mark.parametrize("command", RUN)
def test_quick_commands_run_as_documented(command: str, folder: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(folder)
    try:
        code = app(words_of(command), standalone_mode=False)
    except SystemExit as ended:
        code = ended.code
    # 1 is the answer "no"; 3 says that this machine has no GPU.
    assert code in (None, 0, 1) or (code == 3 and "doctor" in command)
    captured = capfd.readouterr()
    assert captured.out.strip() or words_of(command)[-2] in ("-o", "--output")


def test_the_site_builds_without_a_warning(tmp_path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    command += ["-f", "docs/site/mkdocs.yml", "-d", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "DISABLE_MKDOCS_2_WARNING": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job = (tmp_path / "job" / "index.html").read_text()
    assert "global_batch_size" in job
    assert "--html" in (tmp_path / "cli" / "index.html").read_text()
