"""Does the command line answer at once, and does the demo keep its promises?

`--help` within 0.3 s (warm, median of five); the demo's first line within 0.5 s, all of it within
90 s and 2 GB; and torch is loaded by no `--help`, `pack`, `report` or `why`. Memory is the
proportional set size, summed over the demo's processes and sampled five times a second.

Sampling stops the ranks' memory management now and then, and takes a part of a core. So the demo's
prediction is judged by ten further runs that nothing watches. A run that other processes disturbed
is counted, and marked: its row has `disturbed`, as the demo's result has.

    python bench/cli.py --json [--quick] [--one-demo]

`--quick` leaves the demo out; `--one-demo` judges the prediction by one further run.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from harness import Report, options, tell

PACELINE = Path(sys.executable).parent / "paceline"
SCRIPT = Path(__file__).parent.parent / "examples" / "ddp_digits.py"
HELP_S, FIRST_LINE_S, DEMO_S, DEMO_BYTES = 0.3, 0.5, 90.0, 2e9
DEMOS, STEP_TIME_ERROR = 10, 0.25
WITHOUT_TORCH = """
import sys
from paceline.cli.app import main
try:
    main()
finally:
    sys.stderr.write(f"\\nloaded: {'torch' in sys.modules}\\n")
"""


def help_s(*arguments):
    """Return the median seconds of five warm runs of a `--help`."""
    command = [PACELINE, *arguments, "--help"]
    seconds = []
    for _ in range(6):
        begin = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=60, check=True)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def loads_torch(folder, *arguments):
    """Return whether a command loads torch."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{arguments} failed: {done.stderr}")
    return done.stderr.endswith("loaded: True\n")


def torch_free(report, folder):
    """Add how many commands load torch that should not."""
    from paceline.cli.app import VERBS

    images = folder / "images" / "one"
    images.mkdir(parents=True)
    (images / "a.bin").write_bytes(bytes(100))
    subprocess.run(
        [PACELINE, "run", "-n", "2", "--out", "RUN", SCRIPT, "--epochs", "1"],
        cwd=folder,
        capture_output=True,
        timeout=120,
        check=True,
    )
    commands = [("--help",), *((verb, "--help") for verb in VERBS)]
    commands += [("pack", "images", "images.pack"), ("store", "ls", "images.pack")]
    commands += [("why", "RUN"), ("report", "RUN"), ("trace", "stats", "RUN")]
    guilty = [" ".join(command) for command in commands if loads_torch(folder, *command)]
    report.row(commands=len(commands), load_torch=guilty)
    report.bar("commands that load torch and should not", len(guilty), 0, reason=", ".join(guilty))


class Memory:
    """Samples the memory of a process and all below it until it is told to stop."""

    def __init__(self, pid):
        self.pid = pid
        self.peak_bytes = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()

    def stop(self):
        self.done.set()
        self.thread.join()
        return self.peak_bytes

    def _sample(self):
        from paceline.core.processes import descendants

        while not self.done.wait(0.2):
            pids = [self.pid, *descendants(self.pid)]
            self.peak_bytes = max(self.peak_bytes, sum(map(_pss_bytes, pids)))


def _pss_bytes(pid):
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024


def demo(report, folder):
    """Run the demo once; add its times and its memory."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [PACELINE, "demo"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    memory = Memory(process.pid)
    limit = threading.Timer(4 * DEMO_S, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        first = process.stdout.readline()
        first_line_s = time.perf_counter() - begin
        rest = process.stdout.read()
        code = process.wait()
    finally:
        limit.cancel()
    demo_s = time.perf_counter() - begin
    peak_bytes = memory.stop()
    report.row(
        exit_code=code,
        first_line=first.strip(),
        first_line_s=first_line_s,
        demo_s=demo_s,
        peak_bytes=peak_bytes,
    )
    failed = "" if code == 0 else f"exit code {code}: {rest[-300:]}"
    for name, value, bar in (
        ("first line of the demo, s", first_line_s, FIRST_LINE_S),
        ("the demo, s", demo_s, DEMO_S),
        ("memory of the demo's processes, bytes", peak_bytes, DEMO_BYTES),
    ):
        report.bar(name, None if failed else value, bar, reason=failed)
    report.row(**demo_outcome(folder))


def demo_outcome(folder):
    """Return what the demo in `folder` found; the error is None if it did not end well."""
    path = folder / "paceline-demo" / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    keys = ("test_accuracy", "straggler", "step_time_error", "foreign_cores", "disturbed")
    phases = {
        phase["name"]: [phase["predicted_s"], phase["measured_s"]]
        for phase in result.get("phases", ())
    }
    return {**{key: result.get(key) for key in keys}, "predicted_and_measured_s": phases}


def predictions(report, folder, count):
    """Run the demo `count` times unwatched; add how often its prediction misses the run."""
    missed, disturbed = 0, 0
    for number in range(count):
        place = folder / str(number)
        place.mkdir()
        subprocess.run(
            [PACELINE, "demo"], cwd=place, capture_output=True, timeout=4 * DEMO_S, check=False
        )
        outcome = demo_outcome(place)
        report.row(demo=number, **outcome)
        error = outcome["step_time_error"]
        missed += error is None or error > STEP_TIME_ERROR
        disturbed += bool(outcome["disturbed"])
    report.bar(
        f"demos of {count} whose step time is predicted with an error above {STEP_TIME_ERROR}",
        missed,
        count // 10,
        reason=f"{disturbed} of {count} were disturbed by other processes" if disturbed else "",
    )


def main():
    flags = options(__doc__, switches={"--one-demo": "judge the prediction by one run, not ten"})
    report = Report("cli", flags.json)
    for arguments in ((), ("run",)):
        name = " ".join(("paceline", *arguments, "--help"))
        seconds = help_s(*arguments)
        report.row(command=name, seconds=seconds)
        report.bar(f"{name}, s", seconds, HELP_S)
    with tempfile.TemporaryDirectory() as name:
        torch_free(report, Path(name))
    if flags.quick:
        tell("the demo is left out")
    else:
        with tempfile.TemporaryDirectory() as name:
            demo(report, Path(name))
        with tempfile.TemporaryDirectory() as name:
            predictions(report, Path(name), 1 if flags.one_demo else DEMOS)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
