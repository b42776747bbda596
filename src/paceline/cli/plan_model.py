"""``paceline plan --model``: a transformer on a described machine, from numbers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.output import write_plan
from paceline.cli.plan_search import (
    PRECISIONS,
    VariedField,
    make_space,
    print_scaling,
    print_search,
)
from paceline.cli.plan_simulation import RankFactor, write_simulation

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.estimate import Estimate
    from paceline.core.machine import Machine
    from paceline.perf.transformer import Architecture, Risks, SampleCost

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


class NodeRange(click.ParamType[tuple[int, ...]]):
    """``N`` or ``FIRST..LAST``: numbers of nodes, ascending."""

    name = "N or FIRST..LAST"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the first number, doubled until the last one, and the last one.

        >>> NodeRange().convert("3..16", None, None)
        (3, 6, 12, 16)
        """
        first, dots, last = str(value).partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()) or int(first) < 1:
            self.fail(f"'{value}' is no number of nodes from 1 and no range as 1..512", param, ctx)
        nodes, most = int(first), int(last) if dots else int(first)
        if most < nodes:
            self.fail(f"'{value}' ends before it begins", param, ctx)
        found = []
        while nodes < most:
            found.append(nodes)
            nodes *= 2
        return (*found, most)


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
        click.option(
            "--nodes",
            type=NodeRange(),
            help="With --model: nodes, all devices of each; a range as 1..512 compares plans on "
            "its first number of nodes, doubled until its last.",
        ),
        click.option(
            "--search",
            is_flag=True,
            default=None,
            help="With --batch: compare all plans; flags that are given are fixed. Of a script's "
            "function: data-parallel plans of up to -n ranks on this node [default: its cores].",
        ),
        click.option(
            "--scaling",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="FOLDER",
            help="With --model and a range of --nodes: the best plan at each size; writes "
            "scaling.csv and scaling.svg.",
        ),
        click.option("--samples", type=count, help="With --scaling: samples of the training set."),
        click.option("--epochs", type=count, help="With --samples: passes over them [default: 1]."),
        click.option(
            "--vary",
            type=VariedField(),
            multiple=True,
            help="With --search or --scaling: compare plans of several values too, as "
            "precision=bfloat16,float8, compression=1,4 or loader-workers=2,8.",
        ),
        click.option(
            "--simulate",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="FOLDER",
            help="With --model: replay steps rank by rank and write traces, for paceline why.",
        ),
        click.option("--steps", type=count, help="With --simulate: how many [default: 50]."),
        click.option(
            "--slow",
            type=RankFactor(),
            multiple=True,
            help="With --simulate: a rank that computes slower, as 3:1.5.",
        ),
        click.option(
            "--what-if",
            metavar="CHANGES",
            help="With --model: on another machine, as 'network x2, memory x0.5'; figures: "
            "compute, bandwidth, memory, link, network, storage, loader.",
        ),
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
            type=click.Choice(PRECISIONS),
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
    for name in click.get_current_context().params:
        if is_given(name) and name not in _SHARED and name not in flags:
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

    given = [name for name, value in flags.items() if value not in (None, ())]
    if given or target is None:
        flag = _flag_of(given[0]) if given else ""
        raise UsageError(
            f"{flag} has an effect with --model" if given else "there is no model to plan",
            where=f"paceline plan {flag}".strip(),
            fix="Give --model, or leave it out" if given else "Give FILE.py:FUNCTION or --model",
        )


def refuse_single_flags() -> None:
    """Raise an error for flags that have no effect on a search for a script's function.

    Raises:
        UsageError: one is given.
    """
    from paceline.core.errors import UsageError

    for name in (
        "engine",
        "strategy",
        "partitions",
        "schedule",
        "budget",
        "loader_workers",
        "runs",
    ):
        if is_given(name):
            raise UsageError(
                f"{_flag_of(name)} is for a single plan, not for a search",
                where="paceline plan --search",
                fix="Search without it, then plan the winner with it",
            )


def is_given(name: str) -> bool:
    """Return whether the command line sets a parameter of the current command."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


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
    from paceline.core.file_kind import FileKind, prepare_output
    from paceline.perf.transformer import Risks
    from paceline.perf.transformer.options import make_architecture
    from paceline.probe.machine_file import load_machine

    given = {name: value for name, value in flags.items() if value not in (None, ())}
    nodes = given.pop("nodes", (1,))
    searches = given.pop("search", False) or len(nodes) > 1 or "scaling" in given
    _refuse_lonely_flags(given, searches=searches)
    if out is not None:
        prepare_output(out, FileKind.PLAN)
    risks = Risks(
        jitter=given.pop("jitter", 0.0),
        node_failure_s=3600 * given.pop("node_failure_hours", 0.0),
    )
    simulation = {name: given.pop(name) for name in ("simulate", "steps", "slow") if name in given}
    scaling = given.pop("scaling", None)
    samples = given.pop("samples", 0) * given.pop("epochs", 1)
    sample = _sample(given)
    architecture = make_architecture(model, sequence=given.pop("sequence", None))
    machine = load_machine(machine_path)
    if changes := given.pop("what_if", None):
        machine, sample = _changed(machine, sample, changes)
    if runs:
        from paceline.studies.calibrate import refit_by_runs

        machine = refit_by_runs(machine, architecture, runs)
    if scaling is not None:
        space = make_space(nodes, given, sample=sample, budget=budget)
        print_scaling(
            machine, architecture, space, risks, samples=samples, folder=scaling, as_json=as_json
        )
        return
    if searches:
        space = make_space(nodes, given, sample=sample, budget=budget)
        best = print_search(machine, architecture, space, risks, out=out, as_json=as_json)
    else:
        best = _estimate(machine, architecture, risks, {"nodes": nodes[0], **given}, sample, budget)
        _print_plan(best, architecture, out=out, as_json=as_json)
    if simulation:
        write_simulation(
            machine,
            architecture,
            best.plan,
            best.batch,
            simulation["simulate"],
            sample=sample,
            steps=simulation.get("steps", 50),
            slow=simulation.get("slow", ()),
            jitter=risks.jitter,
        )


def _sample(given: dict[str, Any]) -> SampleCost:
    """Take the flags of a sample out of those that are given; return what one takes to load."""
    from paceline.core.config import parse_size
    from paceline.perf.transformer import SampleCost

    return SampleCost(
        bytes=parse_size(given.pop("sample_bytes", "0")),
        seconds=given.pop("sample_seconds", 0.0),
    )


def _estimate(
    machine: Machine,
    model: Architecture,
    risks: Risks,
    given: dict[str, Any],
    sample: SampleCost,
    budget: str | None,
) -> Estimate:
    """Return the estimate of the one plan that flags describe."""
    from paceline.core.config import parse_size
    from paceline.perf.transformer import estimate_transformer
    from paceline.perf.transformer.options import TransformerOptions, make_plan

    plan, batch = make_plan(machine, TransformerOptions(**given))
    budget_bytes = parse_size(budget) if budget else None
    return estimate_transformer(
        machine, model, plan, batch, risks, sample=sample, budget_bytes=budget_bytes
    )


def _print_plan(
    estimate: Estimate, model: Architecture, *, out: Path | None, as_json: bool
) -> None:
    """Write the file of one plan and print its estimate."""
    from paceline.core.plan_file import PlanFile

    write_plan(out, PlanFile(plan=estimate.plan, estimate=estimate))
    if as_json:
        click.echo(estimate.to_text(), nl=False)
        return
    from rich.console import Console

    from paceline.report.transformer import render_transformer

    console = Console(highlight=False)
    console.print(render_transformer(estimate, model.flops_per_token * model.sequence))
    for warning in estimate.warnings:
        console.print(warning, markup=False, style="yellow", soft_wrap=True)


def _changed(machine: Machine, sample: SampleCost, changes: str) -> tuple[Machine, SampleCost]:
    """Return the machine of ``--what-if``, with a name that says so, and what a sample takes.

    Raises:
        UsageError: a figure is unknown, or is of data where nothing is loaded.
    """
    from dataclasses import replace

    from paceline.core.errors import UsageError
    from paceline.perf.planner.changes import parse_changes, sample_with, with_changes

    factors = parse_changes(changes)
    needs = {"loader": ("--sample-seconds", sample.seconds),
             "storage": ("--sample-bytes", sample.bytes)}  # fmt: skip
    for figure, (flag, value) in needs.items():
        if figure in factors and not value:
            raise UsageError(
                f"'{figure}' has an effect with {flag}",
                where=f"--what-if '{changes}'",
                fix=f"Give {flag}, or leave it out",
            )
    changed = with_changes(machine, factors)
    return replace(changed, name=f"{machine.name}, {changes}"), sample_with(sample, factors)


def _refuse_lonely_flags(given: dict[str, Any], *, searches: bool) -> None:
    """Raise an error for a flag that has an effect only with another one, or not with it.

    Args:
        given: flags that have a value.
        searches: whether plans are compared.

    Raises:
        UsageError: there is one.
    """
    from paceline.core.errors import UsageError

    pairs = (("samples", "scaling"), ("epochs", "samples"), ("steps", "simulate"),
             ("slow", "simulate"))  # fmt: skip
    for name, other in pairs:
        if name in given and other not in given:
            raise UsageError(
                f"{_flag_of(name)} has an effect with {_flag_of(other)}",
                where="paceline plan --model",
                fix=f"Give {_flag_of(other)}, or leave it out",
            )
    if "scaling" in given and "simulate" in given:
        raise UsageError(
            "a simulation is of one plan, a scaling study of several",
            where="paceline plan --model --scaling --simulate",
            fix="Leave out one of the two",
        )
    if "vary" in given and not searches:
        raise UsageError(
            "--vary has an effect where plans are compared",
            where="paceline plan --model --vary",
            fix="Give --search, or a range of --nodes",
        )
