"""Characterizes a program on a machine: a sweep over its settings, run or predicted, as a profile.

::

    axes       values of settings -> cells, each a number of ranks and settings
    plans      the plan that a cell's run follows, with its prediction
    sweep      runs the cells by turns, within a budget, and goes on after an interruption
    measure    a run's folder -> figures of one cell            `log` keeps them, a line each
    curves     the log -> `core.scaling_profile.ScalingProfile`
    predicted  the same profile from estimates on a machine that is not at hand
    digits     the built-in data, models and training script
"""
