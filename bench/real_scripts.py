"""Do scripts as people write them train the same when recorded, and are steps and phases theirs?

Each loop of bench/loops runs twice on two ranks: under torchrun, and under `paceline run`. Then
    - the weights of each rank are the same, bit by bit
    - Paceline counts as many steps as the loop's author does
    - at most 3 % of the loop have no name: everything but `other`, on the rank with the most
in an environment of its own that `scripts/peers loops` makes, with Transformers, Accelerate and
Lightning.

    python bench/real_scripts.py --json [--quick] [--only NAME ...]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import machinery
from pathlib import Path

from harness import Report, options, tell

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "peers" / "loops"
LOOPS = ROOT / "bench" / "loops"
RANKS = 2
FRAMEWORKS = ("trainer_bert", "trainer_gpt2", "accelerate", "lightning")
PLAIN = (
    *("ddp", "accumulation", "lbfgs", "evaluation", "iterable", "all_reduce", "pipeline", "fsdp"),
    *("ddp_of_compiled", "compiled_ddp", "compiled_step"),
    *("gan", "wgan", "marked", "no_optimizer", "by_hand"),
    *("recomputation", "update_in_backward", "average", "nested"),
)
QUICK = ("gan", "evaluation", "no_optimizer", "accelerate")
STEPS, QUICK_STEPS = 60, 30
DEADLINE_S = 300
NAMED_LEAST, KINDS_LEAST = 0.97, 16


def prepare():
    """Make the environment, put Paceline's source as it is now into it, and return its python."""
    subprocess.run([ROOT / "scripts" / "peers", "loops"], check=True, stdout=sys.stderr)
    python = PLACE / "bin" / "python"
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    done = subprocess.run(asked, check=True, capture_output=True, text=True)
    target = Path(done.stdout.strip()) / "paceline"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "paceline", target)
    import paceline._native as native  # its file is copied, and nothing called

    shutil.copy(native.__file__, target / f"_native{machinery.EXTENSION_SUFFIXES[0]}")
    return python


def execute(command, folder):
    """Run a loop in a folder, to which its ranks write their results."""
    environment = {"LOOP_OUT": str(folder), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def run(python, name, steps, folder, *, recorded):
    """Run a loop; return its results by rank, and the folder of its run."""
    folder.mkdir()
    script = folder.parent / "loops" / ("frameworks.py" if name in FRAMEWORKS else "plain.py")
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    if recorded:
        command = [python, "-m", "paceline", "run", "-n", RANKS, "--out", folder / "RUN"]
    done = execute([*command, script, name, steps], folder)
    if done.returncode:
        tell(f"  {name} failed:\n" + "\n".join(done.stderr.splitlines()[-15:]))
        return None
    paths = [folder / f"{name}-{rank}.json" for rank in range(RANKS)]
    return [json.loads(path.read_text()) for path in paths]


def judge(python, name, steps, folder):
    """Return the row of one loop."""
    plain = run(python, name, steps, folder / f"{name}-torchrun", recorded=False)
    there = folder / f"{name}-paceline"
    seen = run(python, name, steps, there, recorded=True)
    row = {"loop": name, "ran": plain is not None and seen is not None}
    if not row["ran"]:
        return {**row, "same_weights": False, "right_steps": False, "named": 0.0}
    result = json.loads((there / "RUN" / "result.json").read_text())
    shares = []
    for rank in result["ranks"]:
        unnamed_s = sum(p["measured_s"] for p in rank["phases"] if p["name"] == "other")
        shares.append(1 - unnamed_s / rank["loop_wall_s"] if rank["loop_wall_s"] else 0.0)
    slowest = max(result["ranks"], key=lambda rank: rank["loop_wall_s"])
    wall_s = max(slowest["loop_wall_s"], 1e-9)
    return {
        **row,
        "same_weights": [p["digest"] for p in plain] == [s["digest"] for s in seen],
        "right_steps": all(
            rank["steps"] == own["steps"] for rank, own in zip(result["ranks"], seen, strict=True)
        ),
        "steps": result["ranks"][0]["steps"],
        "rule": result["step_rule"],
        "step_ms": 1e3 * result["step_time_s"],
        "named": min(shares),
        "evaluation": _share(slowest, "evaluation", wall_s),
        "host": _share(slowest, "host", wall_s),
        "waiting": _share(slowest, "waiting", wall_s),
    }


def _share(rank, phase, wall_s):
    return next((p["measured_s"] for p in rank["phases"] if p["name"] == phase), 0.0) / wall_s


def main():
    chosen = options(__doc__, "--only")
    report = Report("real_scripts", chosen.json)
    names = chosen.only or (QUICK if chosen.quick else (*PLAIN, *FRAMEWORKS))
    steps = QUICK_STEPS if chosen.quick else STEPS
    python = prepare()
    with tempfile.TemporaryDirectory(prefix="real-scripts-") as folder:
        shutil.copytree(LOOPS, Path(folder) / "loops")
        for name in names:
            report.row(**judge(python, name, steps, Path(folder)))
    rows = report.rows
    count = len(rows)
    if not chosen.quick and not chosen.only:
        report.bar("kinds of loops", count, KINDS_LEAST, at_least=True)
    report.bar("same weights", sum(r["same_weights"] for r in rows), count, at_least=True)
    report.bar("right number of steps", sum(r["right_steps"] for r in rows), count, at_least=True)
    report.bar(
        "named, least of all loops", min(r["named"] for r in rows), NAMED_LEAST, at_least=True
    )
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
