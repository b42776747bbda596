"""Merges the traces of a run's ranks: matches collectives and messages, on one clock."""

from paceline.trace.merge.load import Trace, load_run, merge

__all__ = ["Trace", "load_run", "merge"]
