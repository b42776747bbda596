"""Does each framework deliver each sample exactly once, from each feeder?

    python bench/feeders.py --json [--quick] [--only FRAMEWORK ...]

`Loader`, `PackDataset` and `PackSampler` feed plain PyTorch, accelerate, Lightning and the Trainer
of Transformers, on 1 to 3 ranks with 0 and 2 workers (bench/loops/feeders.py). A cell is right if
the ranks have each sample of the pack once, in batches of which all ranks have equally many; or if
Paceline refuses it by name, as it does where accelerate would share out batches of a rank.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import real_scripts
from harness import Report, options, tell

from paceline import store

FRAMEWORKS = ("torch", "accelerate", "lightning", "trainer")
RANKS = (1, 2, 3)
SAMPLES = 120  # a multiple of the global batch, so that nothing is padded


def judge(seen):
    """Return what is said of one cell: a list of samples, or a message, of each rank."""
    failed = [part for part in seen if isinstance(part, str)]
    if failed:
        refused = all(isinstance(part, str) and part.startswith("refused") for part in seen)
        return "refused" if refused else failed[0]
    counts = Counter(sample for part in seen for sample in part)
    if len(set(map(len, seen))) > 1:
        return f"ranks have {list(map(len, seen))} samples"
    missing = SAMPLES - len(counts)
    twice = sum(count - 1 for count in counts.values())
    return "once" if not missing and not twice else f"{missing} missing, {twice} twice"


def run(python, framework, ranks, pack, folder):
    place = folder / f"{framework}-{ranks}"
    place.mkdir()
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    done = real_scripts.execute([*launch, folder / "loops/feeders.py", framework, pack], place)
    if done.returncode:
        raise RuntimeError(f"{framework} on {ranks} ranks failed:\n{done.stderr[-800:]}")
    cells = [json.loads((place / f"feeders-{rank}.json").read_text()) for rank in range(ranks)]
    for cell in cells[0]:
        said = judge([part[cell] for part in cells])
        yield {"framework": framework, "ranks": ranks, "cell": cell, "samples": said}


def main():
    chosen = options(__doc__, "--only")
    report = Report("feeders", chosen.json)
    python = real_scripts.prepare()
    with tempfile.TemporaryDirectory(prefix="feeders-") as place:
        folder = Path(place)
        shutil.copytree(real_scripts.LOOPS, folder / "loops")
        pack = folder / "numbers.pack"
        bodies = [(f"all/{k:04d}", b"%d" % k) for k in range(SAMPLES)]
        store.pack(store.Samples(bodies), pack)
        for framework in FRAMEWORKS:
            if chosen.only and framework not in chosen.only:
                continue
            for ranks in RANKS[1:2] if chosen.quick else RANKS:
                for row in run(python, framework, ranks, pack, folder):
                    report.row(**row)
                    if row["samples"] != "once":
                        tell(f"  {framework} on {ranks}, {row['cell']}: {row['samples']}")
    wrong = [row for row in report.rows if row["samples"] not in ("once", "refused")]
    refused = [row for row in report.rows if row["samples"] == "refused"]
    report.bar("cells that lose, repeat or fail", len(wrong), 0)
    report.bar("cells that are refused", len(refused), 4)  # accelerate shares batches out anew
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
