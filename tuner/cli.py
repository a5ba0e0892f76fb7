"""The `tuner` command. Imports stay light here; each command imports what it needs.

Exit codes: 0 success, 1 the answer is "no", 2 bad input, 3 the environment lacks something.
"""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tuner.errors import EnvironmentLacksError, InputError

app = typer.Typer(
    name="tuner",
    help="Tune Megatron-Core and Megatron Bridge training: memory against throughput.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


calibrate = typer.Typer(
    name="calibrate",
    help="Teach the model of step time what a machine sustains.",
    no_args_is_help=True,
)
app.add_typer(calibrate)


class OutputFormat(str, Enum):
    """How a command prints its answer."""

    TEXT = "text"
    JSON = "json"


class Method(str, Enum):
    """How memory is estimated."""

    DRYRUN = "dryrun"
    COMPOSED = "composed"


Format = Annotated[OutputFormat, typer.Option("--format", help="Print text or one JSON document.")]
GpuOption = Annotated[str | None, typer.Option(help="GPU type, where CONFIG names none.")]
GpusPerNodeOption = Annotated[
    int | None, typer.Option(min=1, help="GPUs of a node, where CONFIG says nothing.")
]
ScriptArgOption = Annotated[
    list[str] | None,
    typer.Option(
        "--script-arg",
        help="What the launch script is started with: an argument, or VARIABLE=VALUE of its "
        "environment; once for each.",
    ),
]
WorldSizeOption = Annotated[
    int | None, typer.Option(min=1, help="Number of GPUs, where CONFIG says nothing.")
]


@app.command()
def check(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML or JSON file: {model, world_size, config}; or a Megatron-LM command line or "
            "launch script, Megatron Bridge overrides or YAML; '-' is standard input."
        ),
    ] = None,
    jsonl: Annotated[
        Path | None, typer.Option("--jsonl", help="Check one JSON document per line instead.")
    ] = None,
    mcore: Annotated[
        str | None, typer.Option(help="Megatron-Core version; default: the installed one.")
    ] = None,
    frontend: Annotated[
        str | None,
        typer.Option(help="mcore, bridge or megatron-lm; default: whose settings these are."),
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Print the smallest valid change.")] = False,
    script_arg: ScriptArgOption = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """Say whether a configuration is valid, why not, and what to change."""
    from tuner.commands.check import run_check

    as_json = output is OutputFormat.JSON
    raise typer.Exit(
        run_check(config, jsonl, mcore, frontend, script_arg or (), fix=fix, as_json=as_json)
    )


@app.command()
def estimate(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML or JSON: {model, world_size, seq_length, global_batch_size, gpu, config}; "
            "or a Megatron-LM command line or launch script, Megatron Bridge overrides or YAML."
        ),
    ] = None,
    gpu: GpuOption = None,
    gpus_per_node: GpusPerNodeOption = None,
    world_size: WorldSizeOption = None,
    jsonl: Annotated[
        Path | None, typer.Option("--jsonl", help="Estimate one JSON document per line instead.")
    ] = None,
    method: Annotated[
        Method,
        typer.Option(
            help="dryrun: real Megatron-Core on tensors without data, for ranks that may hold the "
            "peak; composed: all stages from kept profiles of a few layers, many times faster."
        ),
    ] = Method.DRYRUN,
    timeline: Annotated[
        Path | None,
        typer.Option("--timeline", help="Write the predicted step there, a trace for Perfetto."),
    ] = None,
    script_arg: ScriptArgOption = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """Predict peak memory per rank, and whether it fits the GPU; no GPU is needed."""
    from tuner.commands.estimate import run_estimate

    raise typer.Exit(
        run_estimate(
            config,
            jsonl,
            run={"gpu": gpu, "gpus_per_node": gpus_per_node, "world_size": world_size},
            started_with=script_arg or (),
            method=method.value,
            timeline=timeline,
            as_json=output is OutputFormat.JSON,
        )
    )


@app.command()
def explain(
    config: Annotated[
        Path, typer.Argument(help="YAML or JSON as for estimate, or a launch script or arguments.")
    ],
    gpu: GpuOption = None,
    gpus_per_node: GpusPerNodeOption = None,
    world_size: WorldSizeOption = None,
    script_arg: ScriptArgOption = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """Say where memory goes, and what each lever would save and cost; a better configuration."""
    from tuner.commands.explain import run_explain

    run = {"gpu": gpu, "gpus_per_node": gpus_per_node, "world_size": world_size}
    raise typer.Exit(
        run_explain(config, run, script_arg or (), as_json=output is OutputFormat.JSON)
    )


@app.command()
def validate(
    data: Annotated[Path, typer.Argument(help="Measured runs, one JSON object per line.")],
    jsonl_out: Annotated[
        Path | None, typer.Option("--jsonl-out", help="Write each compared row there.")
    ] = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """Compare estimates with published or recorded measurements."""
    from tuner.commands.validate import run_validate

    raise typer.Exit(run_validate(data, jsonl_out, as_json=output is OutputFormat.JSON))


@app.command()
def plan(
    job: Annotated[
        Path,
        typer.Argument(
            help="Job file, or the name of a shipped job; or a Hugging Face config.json, a launch "
            "script or a configuration."
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="Candidates shown.")] = 10,
    confirm: Annotated[int, typer.Option(min=0, help="Finalists confirmed by full dry runs.")] = 2,
    gpus: Annotated[
        str | None, typer.Option(help="Plan for each of these GPU counts, e.g. 64,128,256.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Plan for each of these GPU types, e.g. h100,b200.")
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence, where JOB is no job file.")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a step, where JOB is no job file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With --gpus or --gpu: picture of tokens/s over GPUs.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the plan there as one HTML file.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the best candidate there, as estimate and export take it."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Dry runs at a time; default: one a core.")
    ] = None,
    script_arg: ScriptArgOption = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """Rank every valid candidate of a job by predicted step time; no GPU is needed."""
    from tuner.commands.plan import PlanRequest, run_plan

    request = PlanRequest(top, confirm, workers)
    as_json = output is OutputFormat.JSON
    raise typer.Exit(
        run_plan(
            job,
            request,
            gpus=gpus,
            gpu=gpu,
            seq_length=seq_length,
            global_batch_size=global_batch_size,
            started_with=script_arg or (),
            plot=plot,
            html=html,
            out=out,
            as_json=as_json,
        )
    )


@app.command()
def tune(
    job: Annotated[
        Path | None, typer.Argument(help="Job file, or the name of a shipped job.")
    ] = None,
    study: Annotated[
        Path | None, typer.Option(help="Study directory to make; default: studies/NAME.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the study in this directory.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Address of a running Ray cluster, or 'auto'.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials in all, in place of the job's budget.")
    ] = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """Run the promising candidates for real and keep the best one that fits."""
    from tuner.commands.tune import run_tune

    raise typer.Exit(
        run_tune(job, study, resume, address, trials, as_json=output is OutputFormat.JSON)
    )


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="best.yaml of a study, or a file like it.")],
    folder: Annotated[
        Path | None, typer.Option("--output", help="Folder for logs; default: a new one.")
    ] = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """Run one candidate alone on this machine, without Ray, and print its figures."""
    from tuner.commands.run import run_one

    raise typer.Exit(run_one(config, folder, as_json=output is OutputFormat.JSON))


@app.command()
def report(
    study: Annotated[Path, typer.Argument(help="Study directory.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="HTML file; default: report.html in the study.")
    ] = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """Write one HTML file that says what a study found; it opens without a network."""
    from tuner.commands.report import run_report

    raise typer.Exit(run_report(study, out, as_json=output is OutputFormat.JSON))


@calibrate.command("measure")
def calibrate_measure(
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU type, where its own name is not known.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="What the file is for; default: bf16, fp32 on a CPU.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks in collectives; default: all GPUs, 4 on a CPU.")
    ] = None,
    scale: Annotated[
        float, typer.Option(min=0.01, max=100.0, help="Stretch the time spent measuring.")
    ] = 1.0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the calibration file there.")
    ] = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """Measure this machine: products, attention, copies, launches, collectives."""
    from tuner.commands.calibrate import run_measure

    as_json = output is OutputFormat.JSON
    raise typer.Exit(run_measure(device, gpu, precision, ranks, scale, out, as_json=as_json))


@calibrate.command("fit")
def calibrate_fit(
    data: Annotated[
        Path, typer.Argument(help="Measured runs, one JSON object per line, or a study directory.")
    ],
    start: Annotated[
        Path | None, typer.Option("--start", help="Calibration file to start from.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Only steps of this GPU.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Only steps of this precision, e.g. bf16 or mxfp8.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the calibration file there.")
    ] = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """Fit the rates of a machine to measured steps."""
    from tuner.commands.calibrate import run_fit

    raise typer.Exit(run_fit(data, start, gpu, precision, out, as_json=output is OutputFormat.JSON))


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(help="Study directory, or a configuration in any readable form.")
    ],
    to: Annotated[
        str,
        typer.Option("--to", help="bridge-cli, bridge-yaml, bridge-python, megatron-args or yaml."),
    ],
    mcore: Annotated[
        str | None, typer.Option(help="Megatron-Core version to write for; default: installed.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the text to this file.")
    ] = None,
    script_arg: ScriptArgOption = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """Write a configuration in the form a training job takes."""
    from tuner.commands.export import run_export

    as_json = output is OutputFormat.JSON
    raise typer.Exit(run_export(source, to, mcore, file, script_arg or (), as_json=as_json))


@app.command()
def diagnose(
    log: Annotated[Path, typer.Argument(help="Training log or error file; '-' is standard input.")],
    mcore: Annotated[
        str | None, typer.Option(help="Megatron-Core version of the run; default: installed.")
    ] = None,
    frontend: Annotated[str, typer.Option(help="Whose rules judge settings in the log.")] = "mcore",
    output: Format = OutputFormat.TEXT,
) -> None:
    """Say what happened in a run, show the evidence, and what to change."""
    from tuner.commands.diagnose import run_diagnose

    raise typer.Exit(run_diagnose(log, mcore, frontend, as_json=output is OutputFormat.JSON))


@app.command()
def doctor(
    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow tracking URI to reach; default: the environment's.")
    ] = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """Say what this machine has, what is missing, and the command to get it."""
    from tuner.commands.doctor import run_doctor

    raise typer.Exit(run_doctor(tracking_uri, as_json=output is OutputFormat.JSON))


@app.command("job-schema")
def job_schema() -> None:
    """Print the JSON Schema of the job file, for editors."""
    from tuner.job import job_schema as schema

    print(json.dumps(schema(), indent=2))


@app.command()
def models(output: Format = OutputFormat.TEXT) -> None:
    """List the models of the catalogue."""
    from tuner.commands.models import list_models

    raise typer.Exit(list_models(as_json=output is OutputFormat.JSON))


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No progress and notes, only the answer.")
    ] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.")] = False,
) -> None:
    if version:
        import importlib.metadata

        print(importlib.metadata.version("megatron-tuner"))
        raise typer.Exit()


def main() -> None:
    """Entry point: errors that are answers become one line and an exit code.

    `--quiet` and `--no-color` may stand anywhere, so they are taken before the commands are read.
    """
    from tuner.commands.output import take_display_flags

    try:
        app(take_display_flags(sys.argv[1:]))
    except (InputError, EnvironmentLacksError) as error:
        print(f"tuner: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
