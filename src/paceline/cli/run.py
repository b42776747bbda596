"""``paceline run``: a script on its ranks, recorded."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.launch.prepare import PreparedJob
    from paceline.launch.program import Program


@click.command(
    context_settings={"allow_interspersed_args": False},  # what follows SCRIPT is the script's
    epilog="""\b
Example: paceline run -n 2 examples/ddp_digits.py --epochs 5
  a module:   paceline run -n 2 -m package.train --epochs 5
  a program:  paceline run -n 2 ./train.sh
  two nodes:  paceline run --nnodes 2 --node-rank 0 --rdzv-endpoint node0 train.py
  torchrun:   paceline record -- torchrun --nproc-per-node 2 train.py
  MPI:        paceline run --mpi -n 4 -- ./program
              mpirun -n 4 paceline run -- ./program
""",
)
@click.option(
    "-n",
    "--ranks",
    "--nproc-per-node",
    "--nproc_per_node",
    "ranks",
    type=int,
    help="Ranks on each node [default: 1].",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the files of the run.")
@click.option(
    "--again",
    is_flag=True,
    help="Keep the run that is in the folder --out as RUN.1, RUN.2 ...: for a requeued job.",
)
@click.option("--record/--no-record", default=None, help="Record traces [default: yes].")
@click.option(
    "--record-io/--no-record-io",
    default=None,
    help="Record calls for files, too: opens, stats, reads, writes, by file [default: no; with "
    "--mpi yes].",
)
@click.option(
    "--profile-steps",
    type=int,
    metavar="N",
    help="Have torch.profiler add the operators and kernels of N steps, from the sixth on "
    "[default: 0].",
)
@click.option(
    "--budget",
    metavar="auto|off|FILE",
    help="Which cores are for what: auto: disjoint ones for each rank, and threads for them; off: "
    "as the system places them; FILE: as a budget.json of another run says [default: auto].",
)
@click.option(
    "--bind/--no-bind", default=None, help="--no-bind is --budget off, --bind --budget auto."
)
@click.option(
    "--tag-output/--no-tag-output",
    default=None,
    help="Put [RANK] before each line that a rank prints.",
)
@click.option("--nnodes", metavar="N", help="Number of nodes, each with a launcher [default: 1].")
@click.option("--node-rank", type=int, help="Number of this node [default: 0].")
@click.option(
    "--rdzv-endpoint",
    metavar="HOST[:PORT]",
    help="Where the launcher of node 0 listens [default of PORT: 29400].",
)
@click.option(
    "--rdzv-id",
    metavar="NAME",
    help="Name of the job, the same on all nodes; without --out it names the run's folder.",
)
@click.option(
    "--allocator",
    type=click.Choice(["keep", "system"]),
    help="keep: malloc does not return freed memory to the system; system: the C library's "
    "defaults [default: keep].",
)
@click.option(
    "--collectives",
    type=click.Choice(["torch", "paceline"]),
    help="paceline: where the script asks for gloo or for no backend, its process group uses the "
    "memory that ranks of a host share; torch: as the script says [default: torch].",
)
@click.option(
    "--node-reader",
    type=click.Choice(["auto", "on", "off"]),
    help="One process of each node reads for the loaders of all its ranks; auto: where several "
    "ranks share a node and the data are larger than half the memory [default: auto].",
)
@click.option(
    "--pace",
    type=click.Choice(["auto", "on", "off"]),
    help="on: loaders refill in the parts of a step that leave cores free; off: as soon as there "
    "is room; auto: on without a GPU [default: auto].",
)
@click.option(
    "--strategy",
    type=click.Choice(["data", "model", "hybrid", "auto"]),
    help="For a script that calls paceline.training.prepare: divide batches among ranks, the "
    "model's layers, or both; auto: what an estimate says is fastest [default: data].",
)
@click.option("--partitions", type=int, help="Parts of the model's layers, each on other ranks.")
@click.option("--replicas", type=int, help="Replicas of the model.")
@click.option("--microbatches", type=int, help="Parts of a batch that go through the partitions.")
@click.option(
    "--rebalance/--no-rebalance",
    default=None,
    help="Ranks that are slower than others get fewer samples of each batch, with weights that "
    "keep the average of gradients; for DataLoaders with a DistributedSampler [default: no].",
)
@click.option(
    "--shares",
    metavar="SPEEDS|RUN",
    help="Begin to rebalance with these speeds of the ranks, as 1,0.6, or with the shares at the "
    "end of a run.",
)
@click.option(
    "--memory-budget",
    metavar="BYTES",
    help="What each rank's process stays under, as 8GiB: tensors that a step does not need for a "
    "while are spilled to a file [default: no limit].",
)
@click.option(
    "--spill-folder",
    help="Folder of that file, on a disk of each node [default: that for temporary files].",
)
@click.option(
    "--mount",
    "mounts",
    metavar="PACK:/PATH",
    multiple=True,
    help="Ranks see the samples of PACK as files below /PATH; may be repeated.",
)
@click.option(
    "--data",
    metavar="PACK[:/PATH]",
    multiple=True,
    help="A server on each node keeps a part of PACK on local storage and serves it to all; ranks "
    "see its samples as files below /PATH; may be repeated.",
)
@click.option(
    "--data-folder",
    help="Folder on local storage of each node where its part stays for the next run [default: "
    "goes with the run].",
)
@click.option("--data-replicas", type=int, help="Copies of each part, on other nodes [default: 1].")
@click.option(
    "--data-tls/--no-data-tls", default=None, help="Encrypt it between nodes [default: no]."
)
@click.option(
    "--token-file",
    metavar="FILE",
    help="Secret by which the run's launchers and servers know each other, in a file that only its "
    "users can read [default: yours, ~/.config/paceline/token; the servers' is made, and goes from "
    "launcher to launcher in the clear].",
)
@click.option(
    "--output",
    "outputs",
    metavar="FOLDER:/PATH",
    multiple=True,
    help="Ranks write files below /PATH to local storage; each is copied to FOLDER in the "
    "background once it is closed; may be repeated.",
)
@click.option(
    "--output-limit",
    metavar="SIZE",
    help="Bytes on a node that may wait to be copied, as 16GiB; then closing a file waits "
    "[default: as many as there is room for].",
)
@click.option(
    "--machine",
    type=click.Path(path_type=Path),
    help="Machine file (from paceline probe) to store in the run's folder, for comparison with "
    "the plan; collectives paceline choose by its table between hosts.",
)
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path),
    help="Follow the plan file (from paceline plan --out), and compare the run with its estimate.",
)
@click.option(
    "--tune",
    metavar="SETTING=A,B",
    help="Try two values of a setting by turns while the job runs, and keep the better: threads, "
    "gc-threshold or loader-nice; A unless B is faster for certain.",
)
@click.option(
    "--hang-timeout",
    metavar="SECONDS",
    help="End the run, and name the rank, when others wait this long for one that shows no sign of "
    "work; off: never [default: 300].",
)
@click.option(
    "--mpi",
    is_flag=True,
    help="SCRIPT uses MPI (C, Fortran, mpi4py): its own mpirun starts it, and its calls are "
    "recorded; of the other options only -n, -m, --out, --machine, --record-io, --hang-timeout and "
    "--json are for it. Within an mpirun each task becomes a rank: only scripts need it there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the world size and the run's folder, with --json all settings; start nothing.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int | None,
    module: bool,
    out: Path | None,
    again: bool,
    record: bool | None,
    record_io: bool | None,
    profile_steps: int | None,
    budget: str | None,
    bind: bool | None,
    allocator: str | None,
    collectives: str | None,
    node_reader: str | None,
    pace: str | None,
    strategy: str | None,
    partitions: int | None,
    replicas: int | None,
    microbatches: int | None,
    rebalance: bool | None,
    shares: str | None,
    memory_budget: str | None,
    spill_folder: str | None,
    mounts: tuple[str, ...],
    data: tuple[str, ...],
    data_folder: str | None,
    data_replicas: int | None,
    data_tls: bool | None,
    token_file: str | None,
    outputs: tuple[str, ...],
    output_limit: str | None,
    tag_output: bool | None,
    nnodes: str | None,
    node_rank: int | None,
    rdzv_endpoint: str | None,
    rdzv_id: str | None,
    machine: Path | None,
    plan_path: Path | None,
    tune: str | None,
    hang_timeout: str | None,
    mpi: bool,
    as_json: bool,
    dry_run: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGS on several ranks and record where its time goes.

    SCRIPT is a Python file, a module (-m), or any program that starts Python; it needs no changes.
    Its ranks get the variables that torchrun gives; inside a Slurm step or under mpirun each task
    becomes a rank. The run's folder holds its traces and result.json.
    """
    click.echo(
        f"paceline run: {script}" + (f" on {ranks} ranks" if ranks and ranks > 1 else ""), err=True
    )
    from paceline.cli.output import print_result, stdout_as_stderr, warn
    from paceline.core.clock import SystemClock
    from paceline.core.config import parse_seconds, parse_size, resolve
    from paceline.core.plan_file import load_plan_file
    from paceline.launch.nodes import parse_nnodes
    from paceline.launch.options import RunConfig
    from paceline.launch.prepare import claim_folder, prepare
    from paceline.launch.program import find_program
    from paceline.launch.run import describe, execute
    from paceline.launch.summary import recording_warnings, trace_warnings
    from paceline.probe.machine_file import known_machine
    from paceline.report.comparable import machine_difference
    from paceline.runs.folder import CONFIG_VERSION

    clock = SystemClock()
    flags = {
        "ranks": ranks,
        "record": record,
        "record_io": record_io,
        "profile_steps": profile_steps,
        "budget": _budget(budget, bind),
        "allocator": allocator,
        "collectives": collectives,
        "node_reader": node_reader,
        "pace": pace,
        "strategy": strategy,
        "partitions": partitions,
        "replicas": replicas,
        "microbatches": microbatches,
        "rebalance": rebalance,
        "shares": shares,
        "memory_budget_bytes": parse_size(memory_budget) if memory_budget else None,
        "spill_folder": spill_folder,
        "mounts": list(mounts) or None,
        "data": list(data) or None,
        "data_folder": data_folder,
        "data_replicas": data_replicas,
        "data_tls": data_tls,
        "token_file": token_file,
        "outputs": list(outputs) or None,
        "output_limit_bytes": parse_size(output_limit) if output_limit else None,
        "tag_output": tag_output,
        "again": again or None,
        "tune": tune,
        "nnodes": parse_nnodes(nnodes) if nnodes is not None else None,
        "node_rank": node_rank,
        "rdzv_endpoint": rdzv_endpoint,
        "rdzv_id": rdzv_id,
        "hang_timeout_s": parse_seconds(hang_timeout) if hang_timeout else None,
    }
    program = find_program(script, is_module=module)
    if mpi and not _is_mpi_rank():
        _run_mpi(program, args, flags, out, machine, plan_path, as_json=as_json, dry_run=dry_run)
        return
    resolved = resolve(RunConfig, flags=flags)
    plan = load_plan_file(plan_path) if plan_path is not None else None
    job = prepare(program, args, resolved, out, clock, plan=plan, machine=machine, mpi=mpi)
    warn(job.warnings)
    described = known_machine(machine)
    if plan is not None and plan.estimate is not None:
        difference = machine_difference(plan.estimate, described.digest(), described.name)
        if difference:
            warn([f"the report will not compare this run with its plan: {difference}"])
    job = job if dry_run else claim_folder(job)
    click.echo(f"paceline run: world size {job.ranks}, writing {job.run_folder}", err=True)
    click.echo("\n".join(f"paceline run: {note}" for note in job.notes), err=True)
    if dry_run:
        if as_json and job.task_number == 0:  # one object from all tasks together
            intended = {"version": CONFIG_VERSION, "dry_run": True, "folder": str(job.run_folder)}
            click.echo(json.dumps({**intended, **describe(job)}))
        return
    with _failures_shown(job), stdout_as_stderr() if as_json else contextlib.nullcontext():
        result = execute(job, machine=described, clock=clock)
    warn(trace_warnings(job.run_folder))
    if job.task_number != 0:  # only rank 0's launcher knows how all ranks ended
        return
    if job.resolved.config.record:
        warn(recording_warnings(job.run_folder))
    if job.resolved.config.tune:
        _say_tuned(job.run_folder)
    print_result(result, job.run_folder, as_json=as_json, recorded=bool(result.ranks))


def _is_mpi_rank() -> bool:
    """Return whether Slurm or an mpirun of the user's has started this launcher as a task.

    Then the program is started as that task, and otherwise by the mpirun of its own MPI.
    """
    from paceline.core.config import environment
    from paceline.launch.task_placement import detect

    return detect(environment()) is not None


def _say_tuned(run: Path) -> None:
    """Print what was found of the setting of ``--tune``."""
    from paceline.report.tuning import tune_words
    from paceline.runs.folder import RunFolder
    from paceline.runs.tuning import TUNE_NAME, TuneResult

    found = RunFolder.open(run).read_record(TuneResult, TUNE_NAME)
    words = tune_words(found) or (
        "Trying the setting of --tune has no result: the run had too few steps of an optimizer."
    )
    click.echo(f"tune: {words}", err=True)


def _budget(budget: str | None, bind: bool | None) -> str | None:
    """Return the setting of the two options that name it."""
    from paceline.core.errors import UsageError

    named = None if bind is None else "auto" if bind else "off"
    if budget is not None and named is not None:
        raise UsageError(
            "--budget and --bind or --no-bind say the same",
            where="--budget",
            fix="Give --budget alone",
        )
    return budget or named


def _run_mpi(
    program: Program,
    args: tuple[str, ...],
    flags: dict[str, Any],
    out: Path | None,
    machine: Path | None,
    plan_path: Path | None,
    *,
    as_json: bool,
    dry_run: bool,
) -> None:
    """Run a program that uses MPI under the mpirun of its MPI, recorded."""
    from paceline.cli.record import run_recorded
    from paceline.core.clock import SystemClock
    from paceline.core.errors import UsageError
    from paceline.launch.mpi import mpirun_command
    from paceline.launch.options import HANG_TIMEOUT_S
    from paceline.launch.record import prepare_command

    own = ("ranks", "record_io", "hang_timeout_s")
    given = [name for name, value in flags.items() if value is not None and name not in own]
    if given or plan_path is not None:
        raise UsageError(
            "--mpi leaves the ranks to mpirun",
            where=", ".join([*given, *(["plan"] if plan_path is not None else [])]),
            why="these settings are of ranks that Paceline starts itself",
            fix="Leave them out, or give mpirun's own: paceline record -- mpirun OPTIONS program",
        )
    files = flags["record_io"] is not False
    command = mpirun_command([*program.command, *args], flags["ranks"] or 1, record_io=files)
    timeout_s = flags["hang_timeout_s"]
    job = prepare_command(
        command,
        out,
        SystemClock(),
        mpi=True,
        record_io=files,
        stem=program.stem,
        hang_timeout_s=HANG_TIMEOUT_S if timeout_s is None else timeout_s,
    )
    click.echo(f"paceline run: {' '.join(command)}", err=True)
    run_recorded(job, machine, as_json=as_json, dry_run=dry_run)


@contextlib.contextmanager
def _failures_shown(job: PreparedJob) -> Iterator[None]:
    """Print the traceback of a script that raised, and what its traces lack."""
    from paceline.cli.output import show_traceback, warn
    from paceline.core.errors import PacelineError
    from paceline.core.processes import ignore_preemption
    from paceline.launch.summary import trace_warnings

    try:
        yield
    except PacelineError as error:
        show_traceback(error, job.run_folder)
        warn(trace_warnings(job.run_folder))
        raise
    finally:
        ignore_preemption()  # all ranks have ended
