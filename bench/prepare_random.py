"""Random models, trained in random ways with `prepare`: right, or refused by name, never wrong.

    python bench/prepare_random.py [--json] [--quick]

1,000 cases (--quick: 80) in worlds of two and three ranks, over gloo and over Paceline's backend.
`bench/random_training/ranks.py` says what a case draws, and what it is compared with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from harness import Report, options, tell

RANKS = Path(__file__).parent / "random_training" / "ranks.py"
WORLDS = ((2, "gloo", 0.35), (2, "paceline", 0.3), (3, "gloo", 0.2), (3, "paceline", 0.15))
DEADLINE_S = 900


def run_world(ranks, backend, first, count, folder):
    """Return what came of each case, by rank."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [str(ranks), backend, str(first), str(count)]
    command = [sys.executable, str(RANKS), str(Path(folder) / "store")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environ,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [json.loads(out.splitlines()[-1]) if out else {} for out in said]


def judged(found):
    """Return for each case what its ranks agree on, or all that they say."""
    for seed in found[0]:
        said = [outcomes.get(seed, "no outcome") for outcomes in found]
        agreed = {text.split(":")[0] for text in said}
        yield seed, said[0] if len(agreed) == 1 else f"wrong: {said}"


def main():
    chosen = options(__doc__)
    report = Report("prepare_random", chosen.json)
    total, outcomes, first = 80 if chosen.quick else 1000, [], 0
    for ranks, backend, share in WORLDS:
        count = round(total * share)
        with tempfile.TemporaryDirectory() as folder:
            found = run_world(ranks, backend, first, count, folder)
        world = list(judged(found))
        kinds = Counter(text.split(":")[0] for _, text in world)
        tell(f"{ranks} ranks over {backend}, {count} cases from {first}: {dict(kinds)}")
        outcomes += [(ranks, backend, seed, text) for seed, text in world]
        first += count
    kinds = Counter(text.split(" (")[0] for *_, text in outcomes)
    for text, count in kinds.most_common():
        report.row(outcome=text, cases=count)
    wrong = [place for place in outcomes if not place[3].startswith(("right", "refused"))]
    for place in wrong:
        report.row(ranks=place[0], backend=place[1], case=place[2], outcome=place[3])
    good = len(outcomes) - len(wrong)
    report.bar("cases that are right or refused by name", good, total, at_least=True)
    sys.exit(report.print())


if __name__ == "__main__":
    main()
