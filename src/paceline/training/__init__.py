"""Captures the Workload of a model before it trains, from one step on fake tensors.

`capture.capture` derives it; `operators` sorts operators into the classes that `perf` has costs
for. Needs torch, so that `perf`, its sibling, does not.
"""
