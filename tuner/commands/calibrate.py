"""`tuner calibrate`: micro-benchmarks of a machine, and rates fitted to measured steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.commands.output import console, print_json
from tuner.errors import InputError

if TYPE_CHECKING:
    from tuner.timing.calibration import Calibration
    from tuner.timing.observations import Observation, Observations

_DEVICES = ("cuda", "cpu")


def run_measure(
    device: str | None,
    gpu: str | None,
    precision: str | None,
    ranks: int | None,
    scale: float,
    out: Path | None,
    *,
    as_json: bool,
) -> int:
    """Measure this machine, write its calibration file and print it; 0."""
    from tuner.measurement import write_json_atomically
    from tuner.timing.measure import measure_machine

    device = device or _device_here()
    if device not in _DEVICES:
        raise InputError(f"{device!r} must be one of {', '.join(_DEVICES)}", field="--device")
    found = measure_machine(device, gpu=gpu, precision=precision, ranks=ranks, scale=scale)
    document = found.to_json()
    if out is not None:
        write_json_atomically(out, document)
    if as_json:
        print_json(document)
        return 0
    _print_rates(found.calibration)
    console().print(f"{len(found.samples)} samples" + (f"; written to {out}" if out else ""))
    return 0


def run_fit(
    data: Path,
    start: Path | None,
    gpu: str | None,
    precision: str | None,
    out: Path | None,
    *,
    as_json: bool,
) -> int:
    """Fit rates to measured steps, write the calibration and print it; 1 without any steps."""
    from tuner.timing.calibration import Calibration
    from tuner.timing.fitting import fit
    from tuner.timing.observations import predictor, read_observations

    found = read_observations(data)
    chosen = _chosen(found.usable, gpu, precision, where=str(data))
    if not chosen:
        console(stderr=True).print(_nothing(found, gpu, precision), style="red")
        return 1
    name, arithmetic = chosen[0].gpu, chosen[0].precision
    prior = Calibration.load(start) if start is not None else starting(name, arithmetic)
    kept, refused = _timeable(chosen, prior)
    if not kept:
        reason = f"{refused[0][0]}: {refused[0][1]}"
        raise InputError(f"no step can be timed; {reason}", where=str(data))
    fitted = fit(prior, predictor(kept, prior), [one.step_time_s for one in kept])
    calibration = fitted.calibration
    document = {
        **calibration.to_json(),
        "fitted_to": [
            {"id": one.id, "measured_s": one.step_time_s, "residual": float(residual)}
            for one, residual in zip(kept, fitted.residuals, strict=True)
        ],
        "skipped": [{"id": i, "reason": r} for i, r in (*found.skipped, *refused)],
    }
    if out is not None:
        from tuner.measurement import write_json_atomically

        write_json_atomically(out, document)
    if as_json:
        print_json(document)
        return 0
    _print_rates(calibration)
    console().print(
        f"{len(kept)} steps fitted, {len(document['skipped'])} left out; residual spread "
        f"{calibration.residual_spread:.1%}" + (f"; written to {out}" if out else "")
    )
    return 0


def starting(gpu: str, precision: str) -> Calibration:
    """What is believed of a GPU before a fit.

    Raises InputError for a CPU, of which nothing is known unless it was measured.
    """
    from tuner.timing.calibration import Calibration, starting_rates
    from tuner.timing.observations import CPU

    if gpu == CPU:
        raise InputError(
            "nothing is known of a CPU beforehand",
            field="--start",
            fix="give the file of tuner calibrate measure --device cpu --out FILE",
        )
    return Calibration.prior(gpu, precision, starting_rates())


def _chosen(
    observations: Sequence[Observation], gpu: str | None, precision: str | None, where: str
) -> list[Observation]:
    """The steps of one GPU and precision. Raises InputError where several are there to choose."""
    from tuner.timing.observations import CPU

    def name(given: str) -> str:
        from tuner.hardware import get_gpu

        return CPU if given == CPU else get_gpu(given).name

    from tuner.precision import short_name

    wanted = None if gpu is None else name(gpu)
    precision = None if precision is None else short_name(precision)
    mine = [
        one
        for one in observations
        if wanted in (None, name(one.gpu)) and precision in (None, one.precision)
    ]
    kinds = Counter((name(one.gpu), one.precision) for one in mine)
    if len(kinds) > 1:
        shown = ", ".join(f"{g} {p} ({n})" for (g, p), n in kinds.most_common())
        raise InputError(
            f"holds steps of {shown}", where=where, fix="choose with --gpu and --precision"
        )
    return mine


def _timeable(
    observations: Sequence[Observation], prior: Calibration
) -> tuple[list[Observation], list[tuple[str, str]]]:
    """The steps that the model can time, and why it cannot time the others."""
    import numpy as np

    from tuner.memory import UnsupportedError
    from tuner.memory.worker_pool import DryRunError
    from tuner.timing.observations import predictor

    kept, refused = [], []
    for one in observations:
        try:
            if not np.isfinite(predictor([one], prior)(prior.rates)).all():
                refused.append((one.id, "Megatron-Core refuses its pipeline schedule"))
                continue
        except (UnsupportedError, DryRunError, InputError) as error:
            refused.append((one.id, str(error)))
            continue
        kept.append(one)
    return kept, refused


def _nothing(found: Observations, gpu: str | None, precision: str | None) -> str:
    wanted = " ".join(filter(None, (gpu, precision)))
    if found.usable:
        kinds = sorted({f"{one.gpu} {one.precision}" for one in found.usable})
        return f"no measured steps of {wanted}; there are those of {', '.join(kinds)}"
    reasons = Counter(reason for _, reason in found.skipped)
    shown = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
    return "no measured steps to fit" + (f": {shown}" if shown else "")


def _device_here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _print_rates(calibration: Calibration) -> None:
    from rich.table import Table

    document: dict[str, Any] = calibration.to_json()
    table = Table("rate", "value", "spread", "meaning", box=None, pad_edge=False)
    for name, entry in document["rates"].items():
        table.add_row(name, f"{entry['value']:.3g}", f"{entry['spread']:.0%}", entry["meaning"])
    out = console()
    out.print(f"{calibration.gpu}, {calibration.precision}, {calibration.source}")
    out.print(table)
