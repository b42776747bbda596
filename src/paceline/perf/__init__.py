"""Predicts step time and memory: Machine + Workload + Plan -> Estimate. Needs no torch.

`costs` has the cost of an operator on a device, `communication` the cost of a collective and its
overlap with the backward pass, `pipeline` replays the schedule of a model in stages; `estimate`
combines them to a step, `divide` cuts a model into stages, and `choose_buckets` compares sizes of
gradient buckets. The Estimate has the phases of a
Trace, so that the two can be compared; `calibrate` fits the Machine to a run's measurements.
"""

from paceline.perf.buckets import choose_buckets
from paceline.perf.estimate import estimate
from paceline.perf.pipeline import divide

__all__ = ["choose_buckets", "divide", "estimate"]
