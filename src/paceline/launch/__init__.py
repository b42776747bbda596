"""Starts a job: its ranks, their cores, how they find each other, and how the job ended.

`run.prepare` checks a run and `run.execute` carries it out and writes the run's folder
(docs/reference/run-folder.md). Each rank is a process of its own (`worker`).
"""
