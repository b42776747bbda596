"""Shares of a batch by the ranks' measured speed, while a script trains.

A rank that is slower than the others, for the length of a run or for a part of it, gets fewer
samples of each batch, and the others more, so that all are ready for the exchange of gradients at
the same time. Each step trains on the samples that it would have trained on anyway, and weights
keep the average of the gradients that over these samples.

::

    stopwatch    how long this rank is busy in a step
    exchange     windows of all ranks, every few batches
    controller   what follows from them: pure, the same on all ranks (division: the arithmetic)
    batches      the ranks' shares of a batch, from the script's own sampler
    gradients    their weights in a backward pass, and when its gradients are there
    script       the hooks of an unchanged script
    log          RUN/balance.jsonl

Source: the need, Pumma et al., Alleviating load imbalance in data processing for large-scale deep
learning, CCGrid 2020, whose own solutions are not public; these are ours.
"""

__all__: list[str] = []
