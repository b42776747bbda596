"""Predicts step time and memory: Machine + Workload + Plan -> Estimate. Needs no torch.

`costs` says what an operator costs on a device, `communication` what a collective costs and how
much of that the backward pass hides; `estimate` puts a step together from both. The Estimate
has the phases of a Trace, so that the two can be laid side by side; `calibrate` fits the
Machine to a run's measurements.
"""

from paceline.perf.estimate import estimate

__all__ = ["estimate"]
