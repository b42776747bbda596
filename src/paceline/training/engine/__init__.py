"""The data-parallel engine: gradients in flat buckets, reduced while the backward pass goes on.

`data_parallel.DataParallel` wraps a model; `buckets` holds its gradients, `modes` says which
collective reduces them and how updated parameters come back, `shared_memory` does so on one host.
Needs torch.
"""
