"""``paceline plan --search`` and ``--scaling``: all plans compared, the best ones shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from paceline.cli.output import write_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Group

    from paceline.core.errors import UsageError
    from paceline.core.estimate import Estimate
    from paceline.core.machine import Machine
    from paceline.core.measured_step import ComputeChoice
    from paceline.perf.planner import PlanSearch, SearchSpace
    from paceline.perf.transformer import Architecture, Risks, SampleCost

PRECISIONS = ("float32", "bfloat16", "float16", "float8")


class VariedField(click.ParamType[tuple[str, tuple[Any, ...]]]):
    """``NAME=VALUE,VALUE``: a field of a plan, and the values that a search tries."""

    name = "NAME=VALUE,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[Any, ...]]:
        """Return the field's name and its values.

        >>> VariedField().convert("loader-workers=2,4", None, None)
        ('loader_workers', (2, 4))
        """
        name, _, text = str(value).partition("=")
        kinds: dict[str, click.ParamType[Any]] = {
            "precision": click.Choice(PRECISIONS),
            "compression": click.FloatRange(min=1),
            "loader-workers": click.IntRange(min=0),
        }
        if name not in kinds:
            self.fail(f"'{name}' is none of {', '.join(kinds)}", param, ctx)
        values = (kinds[name].convert(part, param, ctx) for part in text.split(","))
        return name.replace("-", "_"), tuple(values)


def make_space(
    nodes: tuple[int, ...],
    given: dict[str, Any],
    *,
    sample: SampleCost,
    budget: str | None,
) -> SearchSpace:
    """Return the space of a search.

    Args:
        nodes: numbers of nodes to compare.
        given: flags of the command line that have a value; ``batch`` is 0 where it is not given.
        sample: what it takes to load one.
        budget: memory of each device in words; None: all of it, and nothing leaves the device.

    Raises:
        UsageError: there is no batch, or a flag is fixed and varied.
    """
    from paceline.core.config import parse_size
    from paceline.perf.planner import SearchSpace

    fixed = {name: value for name, value in given.items() if name not in ("batch", "vary")}
    if not given["batch"]:
        raise _no_batch("paceline plan --model --search")
    return SearchSpace(
        batch=given["batch"],
        nodes=nodes,
        fixed=fixed,
        varied=dict(given.get("vary", ())),
        sample=sample if sample.bytes or sample.seconds else None,
        budget_bytes=parse_size(budget) if budget else None,
    )


def _no_batch(where: str) -> UsageError:
    from paceline.core.errors import UsageError

    return UsageError(
        "a search needs the samples of a step",
        where=where,
        why="plans of different batches do not train alike",
        fix="Give --batch",
    )


def print_search(
    machine: Machine,
    model: Architecture,
    space: SearchSpace,
    risks: Risks,
    *,
    out: Path | None,
    as_json: bool,
) -> Estimate:
    """Search plans, write the best one's file and print the outcome; return its estimate.

    Args:
        machine: to plan for.
        model: to train.
        space: plans to compare.
        risks: stragglers and failures, for the best plan's estimate.
        out: plan file to write; None: none.
        as_json: print JSON.

    Raises:
        UsageError: no plan divides the batch.
        MemoryExceeded: no plan fits; what would is said.
    """
    from paceline.core.plan_file import PlanFile
    from paceline.perf.planner import search_plans

    click.echo(f"plan: comparing plans, nodes: {', '.join(map(str, space.nodes))}", err=True)
    search = search_plans(machine, model, space, risks)
    if search.fits:
        write_plan(out, PlanFile(plan=search.best.plan, estimate=search.best))

    def render(best: Estimate) -> Group:
        from paceline.report.transformer import render_transformer

        return render_transformer(best, model.flops_per_token * model.sequence)

    where = f"{model.name} on {machine.name}, {max(space.nodes)} nodes"
    show_search(search, where, render, as_json=as_json)
    return search.best


def print_target_search(
    target: str,
    machine_path: Path | None,
    *,
    ranks: int | None,
    batch: int | None,
    base: dict[str, Any],
    fixed: dict[str, Any],
    compute: ComputeChoice,
    out: Path | None,
    as_json: bool,
) -> None:
    """Search the plan of a user's model, write the best one's file and print the outcome.

    Args:
        target: ``FILE.py:FUNCTION``.
        machine_path: file or name of the machine; None: this host's probe.
        ranks: the most; fewer are compared too. None: as many as the machine has cores.
        batch: samples of a step on all ranks together.
        base: fields that all plans share.
        fixed: values of axes that are not varied.
        compute: as for `paceline.studies.plan_search.TargetPlans.estimates`.
        out: plan file to write; None: none.
        as_json: print JSON.

    Raises:
        UsageError: there is no batch, or no plan for it.
        MemoryExceeded: no plan fits; what would is said.
        PacelineError: see `capture_target`, `TargetPlans.estimates`.
    """
    from paceline.core.file_kind import FileKind, prepare_output
    from paceline.core.plan import Plan
    from paceline.core.plan_file import PlanFile
    from paceline.perf.planner.captured import PASSES
    from paceline.probe.machine_file import load_machine
    from paceline.report.terminal import render_estimate
    from paceline.studies.plan_search import capture_target, search_target

    if not batch:
        raise _no_batch("paceline plan --search")
    if out is not None:
        prepare_output(out, FileKind.PLAN)
    machine = load_machine(machine_path)
    most = ranks or (machine.devices[0].cores if machine.devices else 1)
    counts = tuple(sorted({most, *(2**power for power in range(most.bit_length()))}))
    passes = (fixed["microbatch"],) if "microbatch" in fixed else PASSES

    def progress(text: str) -> None:
        click.echo(f"plan: {text}", err=True)

    progress(f"comparing plans, ranks: {', '.join(map(str, counts))}")
    plans = capture_target(machine, target, batch=batch, ranks=counts, passes=passes)
    space = plans.space(Plan(**base), **fixed)
    search = search_target(plans, space, compute, progress)
    best = search.best
    if search.fits:
        write_plan(out, PlanFile(plan=best.plan, estimate=best, workload=plans.workload(best.plan)))
    where = f"{target} on {machine.name}"
    show_search(search, where, render_estimate, as_json=as_json)


def show_search(
    search: PlanSearch, where: str, render: Callable[[Estimate], Group], *, as_json: bool
) -> None:
    """Print the outcome of a search.

    Args:
        search: that was made.
        where: names model and machine in errors.
        render: returns what is shown of the best plan.
        as_json: print JSON.

    Raises:
        MemoryExceeded: no plan fits; what would is said.
    """
    from paceline.core.errors import MemoryExceeded

    if as_json:
        click.echo(search.to_text(), nl=False)
    else:
        from rich.console import Console

        from paceline.report.plan_search import render_search

        console = Console(highlight=False)
        console.print(render_search(search, render(search.best)))
        for warning in search.best.warnings:
            console.print(warning, markup=False, style="yellow", soft_wrap=True)
    if not search.fits:
        needed, there = search.best.needed_memory_bytes, search.best.available_memory_bytes
        raise MemoryExceeded(
            f"none of {search.compared:,} plans fits",
            where=where,
            why=f"the smallest needs {needed / 2**30:.1f} of {there / 2**30:.1f} GiB of a device",
            fix=f"What would fit: {search.cheapest_change}",
        )


def print_scaling(
    machine: Machine,
    model: Architecture,
    space: SearchSpace,
    risks: Risks,
    *,
    samples: int,
    folder: Path,
    as_json: bool,
) -> None:
    """Search the best plan at each number of nodes, draw and print how the model scales.

    Args:
        machine: to plan for.
        model: to train.
        space: plans to compare at each size.
        risks: stragglers and failures.
        samples: of the whole training; 0: not given.
        folder: for scaling.csv and scaling.svg, made where it is missing.
        as_json: print JSON.

    Raises:
        MemoryExceeded, UsageError: see `scaling_study`.
        StorageError: a file cannot be written.
    """
    from paceline.core.files import commit_text
    from paceline.perf.planner.scaling import scaling_study
    from paceline.report.scaling import render_scaling, scaling_csv
    from paceline.report.scaling_drawing import scaling_svg

    def progress(nodes: int) -> None:
        click.echo(f"plan: comparing plans, nodes: {nodes}", err=True)

    study = scaling_study(machine, model, space, risks, samples=samples, on_progress=progress)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("scaling.csv", scaling_csv(study)), ("scaling.svg", scaling_svg(study))):
        commit_text(folder / name, text)
        click.echo(f"plan: wrote {folder / name}", err=True)
    if as_json:
        click.echo(study.to_text(), nl=False)
        return
    from rich.console import Console

    Console(highlight=False).print(render_scaling(study))
