"""What is known of a model before it trains: its Workload, from a step on tensors without data.

`capture.capture` derives it; `operators` sorts operators into the classes that `perf` has costs
for. Needs torch, so that `perf`, its sibling, does not.
"""
