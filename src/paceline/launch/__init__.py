"""Starts the ranks of a job, binds them to cores, and returns how each rank ended.

`run.prepare` checks a run and `run.execute` carries it out and writes the run's folder
(docs/reference/run-folder.md). Each rank is a process of its own (`worker`).
"""
