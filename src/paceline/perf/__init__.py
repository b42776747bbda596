"""Predicts step time and memory: Machine + Workload + Plan -> Estimate. Needs no torch.

`prices` says what an operator costs on a device, `communication` what a collective costs on a link
and how much of it hides behind the backward pass; `estimate` puts a step together from both. The
Estimate has the phases of a Trace, so that the two can be laid side by side.
"""

from paceline.perf.estimate import Estimate, estimate

__all__ = ["Estimate", "estimate"]
