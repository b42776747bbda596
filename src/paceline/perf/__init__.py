"""Predicts step time and memory: Machine + Workload + Plan -> Estimate. Needs no torch.

`costs` has the cost of an operator on a device, `communication` the cost of a collective and its
overlap with the backward pass; `estimate` combines both to a step. The Estimate has the phases of a
Trace, so that the two can be compared; `calibrate` fits the Machine to a run's measurements.
"""

from paceline.perf.estimate import estimate

__all__ = ["estimate"]
