"""Does prediction meet measurement on models that no fit saw, and does its interval hold?

Eighteen models (`unseen_models.py`: recurrent, depthwise, U-Net, transformers, DLRM, 1-D and
transposed convolutions, mixer; Adam, fused, foreach, bf16, accumulation, checkpointing), each on 1
rank and some on 2 and 4 under DDP over gloo, threads = cores / ranks. Each row is predicted, from a
measured step and from the probe's rates of operator classes, and trained right after.

    python bench/predict_unseen.py --json [--quick] [--resume]

Of each row: step time; peak memory of a process; the bytes that a rank sends per step, as a
recorded run counts them; exposed communication, the difference between steps that reduce gradients
and steps in `no_sync`, in blocks that alternate; ``meeting_s`` is that difference where the ranks
reduce one number instead: waking up, and waiting for each other. Rows beside which other processes
used more than 0.25 cores are marked and reported apart: bars are of the others. Rows are printed as
they are done, and kept: ``--resume`` goes on after them, with the machine that was probed first.
``operators_alone_s`` is the prediction without the residual of whole steps: what the operators'
times alone come to.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Report, options, tell

from paceline.core.allocator import KEEP
from paceline.core.config import cache_folder
from paceline.core.foreign_cpu import cpu_use

HERE = Path(__file__).parent
FOREIGN_CORES = 0.25
RECORDED = 8  # steps of a recorded run
ALONE = (
    *("lstm", "gru", "depthwise", "unet", "vit", "vit_batch_1", "gpt", "gpt_bf16"),
    *("gpt_checkpointing", "dlrm", "dlrm_sparse", "conv1d", "transposed", "mixer"),
    *("mlp_fused", "mlp_foreach", "resnet_accumulation", "translator"),
)
TOGETHER = (
    *(("vit", 2), ("lstm", 2), ("mixer", 2), ("gpt", 2), ("mlp_foreach", 2)),
    *(("resnet_accumulation", 2), ("dlrm", 2), ("depthwise", 2)),
    *(("mixer", 4), ("gpt", 4), ("mlp_foreach", 4)),
)
ROWS = (*((name, 1) for name in ALONE), *TOGETHER)
QUICK = (("vit", 1), ("mlp_fused", 1), ("mixer", 2))


def run_ranks(name, ranks, cores, seconds):
    """Return what each rank of one training printed, and the cores that others used meanwhile."""
    threads = max(1, cores // ranks)
    begin = cpu_use()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "unseen_ranks.py"), name]
                + [str(value) for value in (rank, ranks, threads, f"{folder}/store", seconds)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **KEEP},  # as the plan has it
            )
            for rank in range(ranks)
        ]
        try:
            outcomes = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return outcomes, cpu_use().foreign_cores(begin)


def sent_bytes(name, ranks, cores):
    """Return the bytes that a rank sends per step, as a recorded run of it counts them."""
    from paceline.trace.analysis.analyse import analyse
    from paceline.trace.merge.load import load_run

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [Path(sys.executable).parent / "paceline", "run", "-n", ranks, "--out", run]
        threads = max(1, cores // ranks)
        command += [HERE / "unseen_ranks.py", name, ranks, threads]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
        if done.returncode:
            tell(f"  no trace of {name}: {done.stderr.strip().splitlines()[-1:]}")
            return None
        analysis = analyse(load_run(run))
    # Broadcasts that happen less often than steps are DDP's, when it is made.
    moved = [
        traffic.bytes * (2 * (ranks - 1) / ranks if traffic.operation == "all_reduce" else 1)
        for traffic in analysis.traffic
        if traffic.operation == "all_reduce" or traffic.count >= RECORDED
    ]
    return sum(moved) / RECORDED


def predictions(name, ranks, cores, machine):
    """Return the estimates from a measured step and from rates, and what others used meanwhile."""
    from paceline.core.plan import Mesh, Plan
    from paceline.perf import estimate
    from paceline.training.capture_process import capture_file
    from paceline.training.measured.process import measure_step

    target = f"{HERE / 'unseen_models.py'}:{name}"
    workload = capture_file(target)
    plan = Plan(mesh=Mesh(data=ranks), threads=max(1, cores // ranks))
    measured = measure_step(
        target, machine_digest=machine.digest(), ranks=ranks, threads=plan.threads
    )
    return (
        estimate(machine, workload, plan, measured),
        estimate(machine, workload, plan),
        measured,
    )


def errors(predicted, measured):
    return {"predicted": predicted, "measured": measured, "ratio": predicted / measured}


def row_of(name, ranks, cores, machine, *, quick):
    """Return one row: predictions, then measurements."""
    here, by_rates, step = predictions(name, ranks, cores, machine)
    outcomes, foreign = run_ranks(name, ranks, cores, 1.0 if quick else 2.5)
    # A step ends with its slowest rank; the ranks meet in every step.
    slowest = [max(each) for each in zip(*(rank["steps"] for rank in outcomes), strict=False)]
    measured_s = statistics.median(slowest)
    alone_s = sum(phase.operators_s for phase in step.phases.values())
    row = {
        "model": name,
        "ranks": ranks,
        "foreign_cores": max(foreign, step.foreign_cores),
        "step_s": errors(here.step_time_s, measured_s),
        "by_rates_s": errors(by_rates.step_time_s, measured_s),
        "operators_alone_s": errors(here.step_time_s - step_residual_s(step), measured_s),
        "operators_s": alone_s,
        "interval_s": [here.low_s, here.high_s],
        "holds": here.low_s <= measured_s <= here.high_s,
        "rates_interval_s": [by_rates.low_s, by_rates.high_s],
        "rates_hold": by_rates.low_s <= measured_s <= by_rates.high_s,
        "peak_bytes": errors(
            sum(here.memory_bytes.values()), max(rank["peak_bytes"] for rank in outcomes)
        ),
        "peak_by_rates_bytes": errors(
            sum(by_rates.memory_bytes.values()), max(rank["peak_bytes"] for rank in outcomes)
        ),
        "phases_s": {
            phase: [part.operators_s, part.residual_s] for phase, part in step.phases.items()
        },
    }
    if ranks > 1:
        silent_s, meeting_s = (
            statistics.median(map(max, zip(*(rank[kind] for rank in outcomes), strict=False)))
            for kind in ("alone", "meeting")
        )
        exposed_s = max(1e-9, measured_s - silent_s)
        row["meeting_s"] = meeting_s - silent_s  # of the exposed time, what one number takes too
        # Of the predicted wait, what the ranks lose without meeting is in steps of `no_sync`, too.
        predicted_s = here.breakdown.transfer + here.breakdown.waiting - step.waiting_s
        row["exposed_s"] = errors(predicted_s, exposed_s)
        sent = sent_bytes(name, ranks, cores)
        if sent:
            row["sent_bytes"] = errors(sum(here.link_bytes.values()), sent)
    return row


def step_residual_s(step):
    return sum(phase.residual_s for phase in step.phases.values())


def state_folder():
    return cache_folder() / "bench-predict-unseen"


def begin(report, folder, *, resume, quick):
    """Give the report its machine; return the rows that are there already."""
    from paceline.core.machine_file import read_machine
    from paceline.probe.measure import measure, measure_collectives, with_collectives

    rows, machine = folder / "rows.jsonl", folder / "machine.json"
    if resume and machine.exists() and rows.exists():
        report.machine = read_machine(machine)
        kept = [json.loads(line) for line in rows.read_text().splitlines()]
        for row in kept:
            report.row(**row)
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        probed = measure(Path(place), quick=quick, on_progress=tell)
    costs = () if quick else measure_collectives((4,), on_progress=tell)
    report.machine = with_collectives(probed, costs)
    machine.write_text(report.machine.to_text())
    rows.write_text("")
    return []


def bars(report, rows):
    """Add the bars, of the rows that nothing disturbed."""
    quiet = [row for row in rows if row["foreign_cores"] <= FOREIGN_CORES]
    reason = f"{len(quiet)} of {len(rows)} rows undisturbed"

    def off(field):
        return [abs(row[field]["ratio"] - 1) for row in quiet if field in row]

    def median(field):
        values = off(field)
        return statistics.median(values) if values else None

    def share(field):
        return sum(row[field] for row in quiet) / len(quiet) if quiet else None

    steps = sorted(off("step_s"))
    p90 = steps[min(len(steps) - 1, int(0.9 * len(steps)))] if steps else None
    under = max((1 - row["peak_bytes"]["ratio"] for row in quiet), default=None)
    report.bar("step time, median error", median("step_s"), 0.08, reason=reason)
    report.bar("step time, 90th percentile of errors", p90, 0.20)
    report.bar("peak memory of a process, median error", median("peak_bytes"), 0.05)
    report.bar("peak memory, most that a prediction is under", under, 0.10)
    report.bar("bytes sent per step, median error", median("sent_bytes"), 0.05)
    report.bar("exposed communication, median error", median("exposed_s"), 0.15)
    report.bar("rows within the 90 % interval", share("holds"), 0.85, at_least=True)
    report.bar("step time by operator classes, median error", median("by_rates_s"), 0.15)


def main():
    switches = {"--resume": "go on after the rows that are done"}
    flags = options(__doc__, "--only", switches=switches)
    report = Report("predict_unseen", flags.json)
    done = begin(report, state_folder(), resume=flags.resume, quick=flags.quick)
    known = {(row["model"], row["ranks"]) for row in done}
    cores = report.machine.devices[0].cores
    rows = QUICK if flags.quick else ROWS
    if flags.only:  # as MODEL:RANKS
        rows = [row for row in ROWS if f"{row[0]}:{row[1]}" in flags.only]
    for name, ranks in rows:
        if (name, ranks) in known:
            continue
        row = row_of(name, ranks, cores, report.machine, quick=flags.quick)
        report.row(**row)
        with (state_folder() / "rows.jsonl").open("a") as kept:
            kept.write(json.dumps(row) + "\n")
    bars(report, report.rows)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
