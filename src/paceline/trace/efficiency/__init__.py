"""Why a run is less efficient than its ranks: what they waited for, and what would shorten steps.

    metrics        load balance x serialisation x transfer, and I/O: POP's hierarchy
    wait_states    wait at NxN, late sender, ...; who caused them
    path, what_if  the critical path across ranks; steps with free communication, balanced load
    overlap        communication hidden behind computing
    matrix         bytes and messages by pair of ranks, volume by level of links
    strips         what each rank did when, in columns of equal time
    comparison     what became slower from one run to another

`dependencies` says on whom each wait depended, `graph` and `replay` what happens when parts take
less. A run is measured in `window`s of steps, which an Analysis gives, or a run's folder.
"""

from paceline.trace.efficiency.comparison import (
    RunComparison,
    compare_runs,
    compare_series,
    read_series,
)
from paceline.trace.efficiency.measure import RunEfficiency, measure_efficiency, measure_run
from paceline.trace.efficiency.strips import PhaseStrips, phase_strips

__all__ = [
    "PhaseStrips",
    "RunComparison",
    "RunEfficiency",
    "compare_runs",
    "compare_series",
    "measure_efficiency",
    "measure_run",
    "phase_strips",
    "read_series",
]
