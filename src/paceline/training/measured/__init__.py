"""Measures a model's training step on this machine, operator by operator.

`process` asks `worker`, once per rank, to run a few steps (`steps`) and to time each distinct
operator of a step (`calls` says which are distinct, `timing` times one). `prices` keeps the times
of a machine's operators, so that a model whose operators are known costs a few steps only.
Paceline's `perf` predicts from the answer; without torch, or for another machine than this one, it
takes the rates of operator classes.
"""
