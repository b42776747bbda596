"""Starts things on this node or in this job, and brings back what they left.

`run.prepare` and `run.execute` run a script on ranks, each on its share of the cores, and write the
run's folder (docs/reference/run-folder.md). `probe` measures the node into a Machine, `doctor`
checks it, `predict` captures a user's model and estimates it. What needs torch happens in a process
of its own: `worker`, `probe_worker`, `capture_worker`.
"""
