"""The fault campaigns at full size: counts, and a bar of none that went unnoticed.

    python bench/torture_store.py --json > bench/results/torture_store.json

Runs `paceline torture store` in the temporary folder: 2,000 corruptions, 100 kills, each call that
changes the disk failing with ENOSPC, EIO and EINTR, hostile names. `--quick`: a tenth of it.
"""

import sys
import tempfile
from pathlib import Path

from harness import Report, options, tell

from paceline.studies.torture_parts import TortureOptions
from paceline.studies.torture_store import torture_store

NAMES = {
    "corruptions": "corruptions that were unnoticed, misnamed or a crash",
    "kills": "kills after which something was lost, damaged or left",
    "faults": "failing calls after which a state was neither old nor new",
    "names": "hostile names that wrote outside the folder",
}


def main():
    flags = options(__doc__)
    report = Report("torture_store", flags.json)
    full = TortureOptions()
    quick = TortureOptions(corruptions=200, kills=10, fault_limit=8)
    with tempfile.TemporaryDirectory() as folder:
        done = torture_store(Path(folder), quick if flags.quick else full)
    tell(f"on {done.file_system}, seed {done.seed}")
    for campaign in done.campaigns:
        report.row(
            campaign=campaign.name,
            cases=campaign.cases,
            elapsed_s=campaign.elapsed_s,
            **campaign.counts,
        )
        for failure in campaign.failures:
            tell(f"FAILED: {failure}")
        report.bar(f"{NAMES[campaign.name]}, of {campaign.cases:,}", campaign.failure_count, 0)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
