"""Replays steps of a Plan event by event, rank by rank or by class of ranks, with what goes wrong.

`simulate` returns a `StepSimulation`; `write_run` makes a run folder's traces of it, so that every
analysis works on a prediction. Sits on `perf.transformer`, whose costs it replays. No torch.
"""

from paceline.perf.simulator.disturbances import Disturbances, LinkOutage, SlowRank
from paceline.perf.simulator.recording import write_run
from paceline.perf.simulator.simulation import StepSimulation, simulate

__all__ = ["Disturbances", "LinkOutage", "SlowRank", "StepSimulation", "simulate", "write_run"]
