"""Reads workloads: the trace formats of published schedulers, of sacct, and our own CSV."""
