"""Pipeline parallelism: a model's layers divided among ranks, a batch among microbatches.

    graph        the model's forward pass as a graph of its own submodules
    costs        what each layer costs, and stages of equal cost
    stages       the graph cut into stages, with edges that may skip stages
    runtime      a PipelineSchedule, executed: computing (one stage), transfers (messages)
    gradients    reductions over the replicas of each stage, and of tied weights
    parallel     PipelineParallel, which `paceline.training.prepare` makes of these

Needs torch.
"""
