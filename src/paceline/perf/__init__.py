"""Predicts step time and memory from a Machine, a Workload and a Plan. Needs no torch."""

from paceline.perf.estimate import Estimate, estimate

__all__ = ["Estimate", "estimate"]
