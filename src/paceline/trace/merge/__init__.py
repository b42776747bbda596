"""Joins the files of a run's ranks: who took part in what (matching), on one clock."""

from paceline.trace.merge.load import Trace, load_run, merge

__all__ = ["Trace", "load_run", "merge"]
