"""Analyses a run's events: waits, phases, skew, stragglers, traffic.

`analyse` makes the Analysis in one pass over arrays; every reader of a run takes its figures from
there.
"""

from paceline.trace.analysis.analyse import Analysis, analyse

__all__ = ["Analysis", "analyse"]
