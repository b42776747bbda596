"""One hierarchy of efficiencies, the same for any framework: that of the POP centre of excellence.

    global                     computing time over all ranks' time
      I/O efficiency           of the time outside communication, the share without input and
                               checkpoints
      parallel efficiency      of all ranks' time, the share outside communication
        load balance           mean over the largest of the ranks' times outside communication
        communication          the largest of these times over the run's
          serialisation        lost even on an ideal network: ranks wait for each other in turn
          transfer             lost because data take time to move

Each is the product of those below it. Serialisation and transfer are separated by a replay of the
recorded dependencies on an ideal network.

Source: C. Rosas, J. Gimenez and J. Labarta, Scalability prediction for fundamental performance
factors, Supercomputing Frontiers and Innovations 1(2), 2014; POP, Standard metrics for performance
audits. I/O efficiency stands beside them here, so that computing is what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.record import Record

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class EfficiencyMetrics(Record):
    """The factors of a run's efficiency and their products, each 0 to 1.

    Attributes:
        overall: the share of all ranks' time in which they compute: parallel x io.
        io: of the ranks' time outside communication, the share without input and checkpoints.
        parallel: the share of all ranks' time outside communication: load_balance x communication.
        load_balance: mean over largest of the ranks' times outside communication.
        communication: the largest of these times over the run's: serialisation x transfer.
        serialisation: the largest of these times over the run's on an ideal network.
        transfer: the run's time on an ideal network over its time.
    """

    overall: float
    io: float
    parallel: float
    load_balance: float
    communication: float
    serialisation: float
    transfer: float


def efficiency_metrics(
    outside_s: np.ndarray, io_s: np.ndarray, ideal_s: float, wall_s: float
) -> EfficiencyMetrics:
    """Return the factors of efficiency.

    >>> import numpy as np
    >>> found = efficiency_metrics(np.array([3.0, 1.0]), np.zeros(2), 3.5, 4.0)
    >>> found.parallel, round(found.load_balance, 3), found.transfer
    (0.5, 0.667, 0.875)

    Args:
        outside_s: each rank's time outside communication, shape (ranks,), seconds.
        io_s: the part of it in input and checkpoints, shape (ranks,).
        ideal_s: what the run would take on an ideal network: `outside_s` at the least.
        wall_s: what it took: `ideal_s` at the least.
    """
    largest_s, mean_s = float(outside_s.max()), float(outside_s.mean())
    ideal_s = min(max(ideal_s, largest_s), wall_s)
    io = _ratio(mean_s - float(io_s.mean()), mean_s)
    load_balance = _ratio(mean_s, largest_s)
    serialisation, transfer = _ratio(largest_s, ideal_s), _ratio(ideal_s, wall_s)
    parallel = load_balance * serialisation * transfer
    return EfficiencyMetrics(
        overall=parallel * io,
        io=io,
        parallel=parallel,
        load_balance=load_balance,
        communication=serialisation * transfer,
        serialisation=serialisation,
        transfer=transfer,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0
