"""``paceline plan --model``: a transformer on a described machine, from numbers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Flags of scripts that have a meaning for an architecture too.
_SHARED = (
    "model",
    "machine",
    "machines",
    "batch",
    "schedule",
    "budget",
    "loader_workers",
    "runs",
    "out",
    "as_json",
)


def transformer_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags of transformers to the command; each has a field of `TransformerOptions`."""
    count = click.IntRange(min=1)
    options = [
        click.option(
            "--machines", is_flag=True, help="List the machines that --machine knows by name."
        ),
        click.option(
            "--model",
            metavar="MODEL",
            help="Instead of FILE.py:FUNCTION a transformer: a model's config.json (gpt2, llama, "
            "mistral, mpt, bloom, bert, vit, ...), an architecture as JSON, or numbers, as "
            "layers=24,hidden=2048,heads=16,vocab=50257,sequence=2048.",
        ),
        click.option("--nodes", type=count, help="With --model: nodes, all devices of each."),
        click.option("--sequence", type=count, help="With --model: tokens of a sample."),
        click.option("--microbatch", type=count, help="With --model: samples of a microbatch."),
        click.option("--tensor", type=count, help="With --model: ranks that share each layer."),
        click.option("--stages", type=count, help="With --model: ranks of a pipeline."),
        click.option("--context", type=count, help="With --model: ranks that share a sequence."),
        click.option("--interleave", type=count, help="With --model: stages of each such rank."),
        click.option(
            "--zero",
            type=click.IntRange(0, 3),
            help="With --model: what replicas share out: 1 optimizer, 2 gradients, 3 parameters.",
        ),
        click.option(
            "--recompute",
            type=click.Choice(["none", "selective", "operators", "full"]),
            help="With --model: what the backward pass computes again.",
        ),
        click.option(
            "--precision",
            type=click.Choice(["float32", "bfloat16", "float16", "float8"]),
            help="With --model: dtype of products [default: bfloat16].",
        ),
        click.option("--sequence-parallel/--no-sequence-parallel", default=None),
        click.option("--fused-attention/--no-fused-attention", default=None),
        click.option(
            "--compiled", is_flag=True, default=None, help="With --model: fused operators."
        ),
        click.option("--overlap/--no-overlap", default=None),
        click.option(
            "--compression",
            type=click.FloatRange(min=1),
            metavar="FACTOR",
            help="With --model: replicas exchange 1/FACTOR of their gradients' bytes.",
        ),
        click.option(
            "--sample-bytes",
            metavar="BYTES",
            help="With --model: of a sample, read from the machine's last tier, as 600KiB.",
        ),
        click.option(
            "--sample-seconds",
            type=click.FloatRange(min=0),
            metavar="SECONDS",
            help="With --model: in which a loader process prepares a sample.",
        ),
        click.option(
            "--jitter", type=click.FloatRange(0, 1), help="With --model: spread of ranks' steps."
        ),
        click.option(
            "--node-failure-hours",
            type=click.FloatRange(min=0, min_open=True),
            help="With --model: mean time between failures of a node.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def refuse_other_flags(target: str | None, flags: dict[str, Any]) -> None:
    """Raise an error for a script, or a flag of scripts, beside an architecture.

    Args:
        target: the script's function.
        flags: of transformers.

    Raises:
        UsageError: one is given.
    """
    from paceline.core.errors import UsageError

    if target is not None:
        raise UsageError(
            "a plan is of a script's function or of an architecture",
            where=f"paceline plan {target} --model",
            fix="Leave out one of the two",
        )
    context = click.get_current_context()
    for name in context.params:
        source = context.get_parameter_source(name)
        is_given = source is click.core.ParameterSource.COMMANDLINE
        if is_given and name not in _SHARED and name not in flags:
            raise UsageError(
                f"{_flag_of(name)} has no effect on an architecture",
                where="paceline plan --model",
                fix="Leave it out; see --help for the flags of --model",
            )


def refuse_transformer_flags(target: str | None, flags: dict[str, Any]) -> None:
    """Raise an error for flags of --model without it, and for a missing target.

    Raises:
        UsageError: there is one.
    """
    from paceline.core.errors import UsageError

    given = [name for name, value in flags.items() if value is not None]
    if given or target is None:
        flag = _flag_of(given[0]) if given else ""
        raise UsageError(
            f"{flag} has an effect with --model" if given else "there is no model to plan",
            where=f"paceline plan {flag}".strip(),
            fix="Give --model, or leave it out" if given else "Give FILE.py:FUNCTION or --model",
        )


def _flag_of(name: str) -> str:
    """Return the flag, as users write it, that sets a parameter of the current command."""
    flags = {param.name: param.opts for param in click.get_current_context().command.params}
    return max(flags[name], key=len)


def print_machines(*, as_json: bool) -> None:
    """Print the machines that Paceline describes."""
    from paceline.core.machine_file import library_machine, library_names

    machines = {name: library_machine(name) for name in library_names()}
    if as_json:
        import json

        rows = [{"name": name, "machine": machine.name, "nodes": machine.nodes,
                 "devices": machine.devices[0].count, "device": machine.devices[0].name}
                for name, machine in machines.items()]  # fmt: skip
        click.echo(json.dumps({"version": 1, "machines": rows}))
        return
    width = max(map(len, machines))
    for name, machine in machines.items():
        device = machine.devices[0]
        click.echo(f"{name:{width}}  {machine.nodes} nodes of {device.count} x {device.name}")


def print_transformer(
    model: str,
    machine_path: Path | None,
    flags: dict[str, Any],
    *,
    runs: tuple[Path, ...],
    budget: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Predict a transformer, write its plan file and print the estimate.

    Args:
        model: as `make_architecture` takes it.
        machine_path: file or name of the machine.
        flags: of the command line, None where not given.
        runs: folders of runs of the same architecture, to which the machine is fitted.
        budget: memory of each device in words; None: all of it.
        out: plan file to write; None: none.
        as_json: print JSON.

    Raises:
        PacelineError: see `prepare_output`, `make_plan`, `make_architecture`, `refit_by_runs`,
            `estimate_transformer`.
    """
    from paceline.core.config import parse_size
    from paceline.core.file_kind import FileKind, prepare_output
    from paceline.core.files import commit_text
    from paceline.core.plan_file import PlanFile
    from paceline.perf.transformer import Risks, SampleCost, estimate_transformer
    from paceline.perf.transformer.options import TransformerOptions, make_architecture, make_plan
    from paceline.probe.machine_file import load_machine

    if out is not None:
        prepare_output(out, FileKind.PLAN)
    given = {name: value for name, value in flags.items() if value is not None}
    risks = Risks(
        jitter=given.pop("jitter", 0.0),
        node_failure_s=3600 * given.pop("node_failure_hours", 0.0),
    )
    sample = SampleCost(
        bytes=parse_size(given.pop("sample_bytes", "0")),
        seconds=given.pop("sample_seconds", 0.0),
    )
    architecture = make_architecture(model, sequence=given.pop("sequence", None))
    machine = load_machine(machine_path)
    if runs:
        from paceline.studies.calibrate import refit_by_runs

        machine = refit_by_runs(machine, architecture, runs)
    plan, batch = make_plan(machine, TransformerOptions(**given))
    estimate = estimate_transformer(
        machine,
        architecture,
        plan,
        batch,
        risks,
        sample=sample,
        budget_bytes=parse_size(budget) if budget else None,
    )
    if out is not None:
        commit_text(out, PlanFile(plan=plan, estimate=estimate).to_text())
        click.echo(f"plan: wrote {out}", err=True)
    if as_json:
        click.echo(estimate.to_text(), nl=False)
        return
    from rich.console import Console

    from paceline.report.transformer import render_transformer

    console = Console(highlight=False)
    console.print(
        render_transformer(estimate, architecture.flops_per_token * architecture.sequence)
    )
    for warning in estimate.warnings:
        console.print(warning, markup=False, style="yellow", soft_wrap=True)
