"""``paceline plan``: step time and memory of a model, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.output import write_plan
from paceline.cli.plan_model import (
    is_given,
    print_machines,
    print_transformer,
    refuse_other_flags,
    refuse_single_flags,
    refuse_transformer_flags,
    transformer_flags,
)
from paceline.cli.plan_search import print_target_search

if TYPE_CHECKING:
    from paceline.core.allocator import AllocatorChoice
    from paceline.core.measured_step import ComputeChoice
    from paceline.core.plan import CollectivesChoice, EngineChoice, PipelineChoice, StrategyChoice


@click.command(
    epilog="""\b
Example: paceline plan examples/digits_step.py:step -n 2
  nothing runs: paceline plan examples/digits_step.py:step --compute rates
  the fastest: paceline plan examples/digits_step.py:step --search --batch 256 --out plan.json
  in stages: paceline plan examples/digits_step.py:step -n 4 --strategy auto
  a transformer: paceline plan --model config.json --machine selene --nodes 4 --tensor 8 --zero 1
  the best plan: paceline plan --model config.json --machine selene --nodes 1..64 --batch 512
  corrected by a run of the last plan: paceline plan ... --from paceline-runs/train-20260101-120000
"""
)
@click.argument("target", metavar="[FILE.py:FUNCTION]", required=False)
@click.option("-n", "--ranks", type=click.IntRange(min=1), default=1, help="Ranks [default: 1].")
@click.option(
    "--machine",
    type=click.Path(path_type=Path),
    help="Machine file, or a name of --machines [default: this host's probe].",
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads per rank [default: cores / ranks]."
)
@click.option(
    "--allocator",
    type=click.Choice(["keep", "system"]),
    default="keep",
    help="keep: malloc does not return freed memory to the system; system: the C library's "
    "defaults [default: keep].",
)
@click.option(
    "--collectives",
    type=click.Choice(["torch", "paceline"]),
    default="torch",
    help="Backend of the ranks' collectives, as for paceline run [default: torch].",
)
@click.option(
    "--engine",
    type=click.Choice(["ddp", "fsdp2", "allreduce", "sharded"]),
    default="ddp",
    help="What reduces gradients where the script calls paceline.training.prepare [default: ddp].",
)
@click.option(
    "--buckets",
    metavar="BYTES",
    help="Gradients that are reduced in one collective, as 8MiB; auto: the size of the shortest "
    "predicted step [default: torch's 25 MiB].",
)
@click.option(
    "--strategy",
    type=click.Choice(["data", "model", "hybrid", "auto"]),
    help="data: each rank has the whole model; model: each has a stage of its layers; hybrid: "
    "stages times replicas; auto: the fastest of these by prediction [default: data, or hybrid "
    "with --partitions].",
)
@click.option("--partitions", type=click.IntRange(min=1), help="Stages of the model.")
@click.option(
    "--microbatches",
    type=click.IntRange(min=1),
    help="Microbatches of a replica's batch [default: 4 for each stage].",
)
@click.option(
    "--schedule",
    type=click.Choice(["1f1b", "fill_drain", "zero_bubble"]),
    default="1f1b",
    help="Order in which the stages compute microbatches [default: 1f1b].",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="Samples of a step on all ranks together [default: each replica has FUNCTION's batch; "
    "with --strategy auto each rank].",
)
@click.option(
    "--fit",
    "budget",
    metavar="BYTES",
    help="Plan for a memory budget of each rank, as 8GiB: what is kept, computed again, spilled; "
    "with --partitions, of each stage; with --model, of each device.",
)
@click.option(
    "--loader-workers",
    type=click.IntRange(min=0),
    help="Processes of a rank that prepare batches beside the step [default: 0, the loop does].",
)
@click.option(
    "--from",
    "runs",
    multiple=True,
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Correct the machine by a run that followed a plan of this model, or by those of paceline "
    "characterize; several times: by all.",
)
@click.option(
    "--compute",
    type=click.Choice(["auto", "measured", "rates"]),
    default="auto",
    help="measured: run a few steps here and time each distinct operator; rates: the machine's "
    "rates of operator classes, nothing runs; auto: measured if the machine is this host and the "
    "step runs [default: auto].",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="File to write the plan to, for paceline run --plan; an older plan there is replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the estimate as JSON on stdout.")
@transformer_flags
def plan(
    target: str | None,
    ranks: int,
    machine: Path | None,
    threads: int | None,
    allocator: AllocatorChoice,
    collectives: CollectivesChoice,
    engine: EngineChoice,
    buckets: str | None,
    strategy: StrategyChoice | None,
    partitions: int | None,
    microbatches: int | None,
    schedule: PipelineChoice,
    batch: int | None,
    budget: str | None,
    loader_workers: int | None,
    runs: tuple[Path, ...],
    compute: ComputeChoice,
    out: Path | None,
    as_json: bool,
    machines: bool,
    model: str | None,
    **flags: Any,
) -> None:
    """Predict step time and memory of a model on this machine, or of a transformer on any.

    With --strategy or --partitions the model's layers are divided into stages of equal cost, one on
    each rank, and the order in which they compute microbatches is replayed.

    FUNCTION takes no argument and returns a tuple or dict of module, inputs, target, loss_fn and
    optimizer (a function of the parameters). A JSON file with a Workload, or a plan file with one,
    takes its place where torch is not installed. The model is captured with fake tensors (shapes
    without data). With --compute measured, and by default on the host that was probed, a few steps
    run in processes of their own, as many at once as ranks. Warnings below the tables say what
    makes the prediction less certain: too little memory, operators whose rate was not measured, a
    machine that was busy while it was probed, an extrapolation.
    """
    if runs:
        from paceline.runs.characterized import planned_runs

        runs = planned_runs(runs)
    if machines:
        print_machines(as_json=as_json)
        return
    if model is not None:
        refuse_other_flags(target, flags)
        shared = {
            "batch": batch or 0,
            "schedule": schedule if is_given("schedule") else None,
            "loader_workers": loader_workers,
        }
        print_transformer(
            model,
            machine,
            {**flags, **shared},
            runs=runs,
            budget=budget,
            out=out,
            as_json=as_json,
        )
        return
    searches = bool(flags.pop("search", None))
    recompute = flags.pop("recompute", None) if searches else None
    refuse_transformer_flags(target, flags)
    assert target is not None
    from paceline.core.config import parse_size

    if searches:
        refuse_single_flags()
        size = parse_size(buckets) if buckets not in (None, "auto") else None
        axes = {
            "threads": threads,
            "microbatch": microbatches,
            "recompute": recompute,
            "collectives": collectives if is_given("collectives") else None,
            "bucket": size,
        }
        print_target_search(
            target,
            machine,
            ranks=ranks if is_given("ranks") else None,
            batch=batch,
            base={"allocator": allocator},
            fixed={name: value for name, value in axes.items() if value is not None},
            compute=compute,
            out=out,
            as_json=as_json,
        )
        return
    from paceline.core.file_kind import FileKind, prepare_output
    from paceline.studies.predict import StrategyOptions, predict

    if out is not None:
        prepare_output(out, FileKind.PLAN)
    planned = predict(
        target,
        ranks=ranks,
        threads=threads,
        machine_path=machine,
        allocator=allocator,
        collectives=collectives,
        engine=engine,
        strategy=StrategyOptions(
            strategy=strategy,
            partitions=partitions,
            microbatches=microbatches,
            schedule=schedule,
            batch=batch,
            fit_bytes=parse_size(budget) if budget else None,
            buckets="auto" if buckets == "auto" else parse_size(buckets) if buckets else None,
            compute=compute,
            loader_workers=loader_workers or 0,
            runs=runs,
        ),
    )
    assert planned.estimate is not None
    write_plan(out, planned)
    if as_json:
        click.echo(planned.estimate.to_text(), nl=False)
    else:
        from rich.console import Console

        from paceline.report.terminal import render_estimate

        console = Console(highlight=False)
        console.print(render_estimate(planned.estimate))
        if planned.estimate.warnings:
            console.print()
        for warning in planned.estimate.warnings:
            console.print(warning, markup=False, style="yellow", soft_wrap=True)
