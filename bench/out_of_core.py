"""Training in less memory than a step needs: plans against the ways that people have today.

A transformer (2,048 tokens a step) and a CNN train with Adam, each process in a memory cgroup of
its own. The peak of plain training without a limit is measured first; the limits are parts of it.
Modes:

- plain: in core. Under a limit it is killed.
- planned: `paceline.training.OutOfCore`; the budget is what it finds as the cgroup's limit.
- checkpointing: every block is computed again (torch.utils.checkpoint).
- mapped: saved tensors are copied to a mapped file and come back by page faults: the naive way.
- deepspeed: ZeRO stage 3 with parameters and optimizer state offloaded, to memory and to a file
  (`out_of_core_deepspeed.py`), in the Python environment of --peer.

Parts: `fits` (no limit: what the hooks cost), 0.6 and 0.3 of the peak, `ranks` (two data-parallel
ranks at 0.6 of what both take), `peer`, `gpu` (a card capped to two thirds of what the model takes:
`out_of_core_gpu.py` has its modes; not run without a GPU). Processes of the modes take turns for
some rounds; ratios are of the median times of steps, and their median over the rounds. Gradients of
all steps are compared by digest with those of plain training. A plan's predictions are compared
with what was measured: the slow-down with that over planned steps that spill nothing, whose
allocator is the same (plain training takes page faults that they do not), the peak with the most
memory that was in use, the peak in core with that of plain training, where glibc keeps some of what
is freed. Under a plan freed memory fills the budget: the peak of all is compared with that.

    python bench/out_of_core.py --json [--quick] [--only MODEL ...] [--parts PART ...]
        [--rounds N] [--folder FOLDER] [--peer PYTHON]

Needs root (a memory cgroup of version 1) and a local disk.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Report, options, run_sections, tell
from memory_cgroup import MemoryCgroup

HERE = Path(__file__).parent
MODELS = ("transformer", "cnn")
PARTS = ("fits", "0.6", "0.3", "ranks", "peer", "gpu")
DEADLINE_S = 900
RECORDED = 3  # steps of a planned training before its plan, at most
TIMED = 4
FITS_BYTES = 1 << 40  # a budget that spills nothing
# Without these glibc keeps what is freed, and what saves memory is killed all the same.
_RETURNS = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
SETTINGS = {"checkpointing": _RETURNS, "mapped": _RETURNS}
CARD_PART = 1.5  # of what a capped card has, the model takes
GPU_MODES = ("plain", "checkpointing", "offloaded", "managed", "prefetched")
SLOWER_BAR, NAIVE_BAR, FITS_BAR = 1.3, 1.9, 1.02
PEAK_ERROR_BAR, SLOWDOWN_ERROR_BAR = 0.05, 0.15


class Killed(Exception):
    """The kernel killed a process that needed more memory than its cgroup has."""


class Bench:
    """Starts trainings of one model, and reports on them."""

    def __init__(self, report, model, flags):
        self.report, self.model, self.flags = report, model, flags
        self.quick = flags.quick
        self.rounds = int(flags.rounds[0]) if flags.rounds else (1 if flags.quick else 3)
        self.folder = Path(flags.folder[0] if flags.folder else HERE.parent / "build").absolute()
        self.folder.mkdir(exist_ok=True)
        self.plain = self.peak = None

    def run(self, mode, limit_bytes, ranks=1, **more):
        """Train in processes in one cgroup; return what the first printed, and the group's peak.

        Raises:
            Killed: they needed more memory.
        """
        asked = {
            "mode": mode, "model": self.model, "folder": str(self.folder), "quick": self.quick,
            "steps": RECORDED + (2 if self.quick else TIMED), **more,
        }  # fmt: skip
        with MemoryCgroup(limit_bytes) as group, tempfile.TemporaryDirectory() as store:
            processes = []
            for rank in range(ranks):
                if ranks > 1:
                    asked |= {"rank": rank, "ranks": ranks, "store": f"{store}/ranks"}
                script = [sys.executable, str(HERE / "out_of_core_ranks.py"), json.dumps(asked)]
                environ = {**os.environ, **SETTINGS.get(mode, {}), "LOCAL_WORLD_SIZE": str(ranks)}
                processes.append(
                    subprocess.Popen(
                        group.command(script), stdout=subprocess.PIPE, text=True, env=environ
                    )
                )
            outcome = self._await(mode, processes, limit_bytes)
            return {**outcome, "group_peak_bytes": group.peak_bytes()}

    def _await(self, mode, processes, limit_bytes):
        try:
            said = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
            codes = [process.returncode for process in processes]
            if -signal.SIGKILL in codes:  # the other rank fails for want of it
                raise Killed(f"{mode} was killed under {limit_bytes / 1e6:,.0f} MB")
            if any(codes):
                sys.exit(f"{mode} ended with {codes}")
        finally:
            for process in processes:
                process.kill()
        return json.loads(said[0])

    def row(self, mode, part, outcome, **more):
        self.report.row(
            model=self.model, mode=mode, limit=part, step_s=step_s(outcome),
            faults=statistics.median(outcome["faults"][RECORDED:]),
            group_peak_bytes=outcome["group_peak_bytes"], **more, **outcome.get("out_of_core", {}),
        )  # fmt: skip

    def measure(self, parts):
        if "gpu" in parts:
            self.gpu()
        parts = [part for part in parts if part != "gpu"]
        if not parts:
            return
        self.plain = self.run("plain", None)
        self.peak = self.plain["group_peak_bytes"]
        self.row("plain", "none", self.plain)
        for part in parts:
            if part == "fits":
                self.fits()
            elif part == "ranks":
                self.ranks()
            elif part == "peer":
                self.peer()
            else:
                self.under(float(part), int(float(part) * self.peak))

    def fits(self):
        """Compare with plain training where all fits."""
        ratios = []
        for _ in range(self.rounds):
            plain = self.run("plain", None)
            ratios.append(step_s(self.run("planned", None, budget=FITS_BYTES)) / step_s(plain))
        self.report.row(model=self.model, mode="planned", limit="none", over_plain=ratios)
        name = f"{self.model}, all fits: time / plain"
        self.report.bar(name, statistics.median(ratios), FITS_BAR)

    def is_killed(self, name, limit, **more):
        """Report whether plain training is killed."""
        try:
            self.run("plain", limit, **more)
            was_killed = 0
        except Killed as problem:
            was_killed = 1
            tell(f"  {problem}")
        self.report.bar(f"{name}: plain training is killed", was_killed, 1, at_least=True)

    def under(self, part, limit):
        """Compare the modes under a limit."""
        name = f"{self.model} at {part:.0%}"
        self.is_killed(name, limit)
        ratios = {mode: [] for mode in ("planned", "checkpointing", "mapped")}
        planned, are_equal = [], True
        for _ in range(self.rounds if part > 0.5 else 1):
            now = step_s(self.run("plain", None))
            in_core = step_s(self.run("planned", None, budget=FITS_BYTES))
            for mode, found in ratios.items():
                try:
                    outcome = self.run(mode, limit)
                except Killed as problem:
                    tell(f"  {problem}")
                    self.report.row(model=self.model, mode=mode, limit=part, outcome="killed")
                    continue
                found.append(step_s(outcome) / now)
                same = outcome["digests"] == self.plain["digests"]
                if mode == "planned":
                    planned.append((outcome, step_s(outcome) / in_core))
                    are_equal = are_equal and same
                self.row(mode, part, outcome, over_plain=found[-1], bits_equal=same)
        self.report.bar(f"{name}: planned training completes", len(planned), 1, at_least=True)
        if not planned:
            return
        equal = f"{name}: gradients equal to the bit"
        self.report.bar(equal, int(are_equal), 1, at_least=True)
        over = {mode: statistics.median(found) for mode, found in ratios.items() if found}
        if part > 0.5:
            self.report.bar(f"{name}: time / plain", over["planned"], SLOWER_BAR)
            gain = over["mapped"] / over["planned"] if "mapped" in over else None
            reason = "" if gain else "the naive way was killed"
            naive = f"{name}: naive time / planned"
            self.report.bar(naive, gain, NAIVE_BAR, at_least=True, reason=reason)
        self.predictions(name, planned)

    def predictions(self, name, planned):
        """Compare what plans said with what happened."""
        peaks, errors, in_core_errors, slow = [], [], [], []
        in_core = max(filter(None, self.plain["peaks"]))
        for outcome, over_in_core in planned:
            said = outcome["out_of_core"]
            peak = max(filter(None, outcome["peaks"]))
            peaks.append(peak / said["budget_bytes"])
            plan = said["plan"]
            errors.append(abs(plan["peak_bytes"] / said["peak_used_bytes"] - 1))
            in_core_errors.append(abs(plan["in_core_peak_bytes"] / in_core - 1))
            slow.append(abs(plan["slowdown"] / over_in_core - 1))
        bar = self.report.bar
        bar(f"{name}: peak / budget", max(peaks), 1)
        for what, found in (("peak", errors), ("peak in core", in_core_errors)):
            bar(f"{name}: error of the predicted {what}", statistics.median(found), PEAK_ERROR_BAR)
        bar(f"{name}: error of the slow-down", statistics.median(slow), SLOWDOWN_ERROR_BAR)

    def ranks(self):
        """Train on two data-parallel ranks within 60 % of what both take."""
        plain = self.run("plain", None, ranks=2)
        limit = int(0.6 * plain["group_peak_bytes"])
        name = f"{self.model}, 2 ranks at 60%"
        self.is_killed(name, limit, ranks=2)
        try:
            outcome = self.run("planned", limit, ranks=2)
        except Killed as problem:
            self.report.bar(f"{name}: completes", 0, 1, at_least=True, reason=str(problem))
            return
        same = outcome["digests"] == plain["digests"]
        over = step_s(outcome) / step_s(plain)
        self.row("planned, 2 ranks", 0.6, outcome, over_plain=over, bits_equal=same)
        self.report.bar(f"{name}: gradients equal to the bit", int(same), 1, at_least=True)
        self.report.bar(f"{name}: time / plain", over, SLOWER_BAR)

    def peer(self):
        """Train with DeepSpeed's offload, or say why not. Its bits are its own: no bar."""
        if not self.flags.peer:
            self.report.row(model=self.model, mode="deepspeed", outcome="not run: no --peer PYTHON")
            return
        script = [self.flags.peer[0], str(HERE / "out_of_core_deepspeed.py")]
        for device in ("cpu", "nvme"):
            asked = {"model": self.model, "device": device, "folder": str(self.folder),
                     "quick": self.quick, "steps": RECORDED + TIMED}  # fmt: skip
            with MemoryCgroup(int(0.6 * self.peak)) as group:
                command = group.command([*script, json.dumps(asked)])
                try:
                    done = subprocess.run(
                        command, capture_output=True, text=True, timeout=DEADLINE_S / 3
                    )
                except subprocess.TimeoutExpired:
                    outcome = {"outcome": f"did not end within {DEADLINE_S / 3:g} s"}
                else:
                    outcome = _peer_outcome(done, self.plain)
                self.report.row(
                    model=self.model, mode=f"deepspeed, offload to {device}", limit=0.6,
                    group_peak_bytes=group.peak_bytes(), **outcome,
                )  # fmt: skip

    def gpu(self):
        """Train on a card that has two thirds of what the model takes, or say why not."""
        if not _has_gpu():
            self.report.row(model=self.model, mode="gpu", outcome="not run: no GPU here")
            return
        plain = self._on_gpu("plain")
        self.report.row(model=self.model, mode="gpu, plain", **_gpu_row(plain, plain))
        cap = int(plain["peak_bytes"] / CARD_PART)
        for mode in GPU_MODES:
            outcome = self._on_gpu(mode, cap_bytes=cap)
            found = _gpu_row(outcome, plain) if outcome else {"outcome": "failed"}
            self.report.row(model=self.model, mode=f"gpu, {mode}", limit=1 / CARD_PART, **found)

    def _on_gpu(self, mode, **more):
        asked = {"mode": mode, "model": self.model, "quick": self.quick,
                 "steps": RECORDED + TIMED, **more}  # fmt: skip
        script = [sys.executable, str(HERE / "out_of_core_gpu.py"), json.dumps(asked)]
        done = subprocess.run(script, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def _has_gpu():
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


def _gpu_row(outcome, plain):
    row = {
        "step_s": step_s(outcome),
        "over_plain": step_s(outcome) / step_s(plain),
        "bits_equal": outcome["digests"] == plain["digests"],
    }
    if "out_of_core" in outcome:
        row["hidden_part"] = outcome["out_of_core"]["hidden_part"]
    return row


def _peer_outcome(done, plain):
    if done.returncode == -signal.SIGKILL:
        return {"outcome": "killed"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"outcome": "failed", "why": lines[-1][:300] if lines else str(done.returncode)}
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "outcome": "completes",
        "step_s": step_s(found),
        "over_plain": step_s(found) / step_s(plain),
    }


def step_s(outcome):
    return statistics.median(outcome["step_s"][RECORDED:])


def main():
    flags = options(__doc__, "--only", "--parts", "--rounds", "--folder", "--peer")
    report = Report("out_of_core", flags.json)
    models = flags.only or (MODELS[:1] if flags.quick else MODELS)
    parts = flags.parts or (("0.6",) if flags.quick else PARTS)
    run_sections(models, lambda model: Bench(report, model, flags).measure(parts), report)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
