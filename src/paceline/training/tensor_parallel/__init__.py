"""Large linear layers divided among the ranks, in a model whose other layers each rank has whole.

    rank 0  x0 --conv--conv--+                          +-- y0 -- loss of its own batch
                             |   W, by its columns      |
                             +-> rank 0: x W0^T         |
            exchange of      |   rank 1: x W1^T         +   exchange of outputs
            inputs           +-> each for all rows -----+
    rank 1  x1 --conv--conv--+                          +-- y1

A convolution has few parameters and large activations: its gradients are reduced. A fully connected
layer has many parameters and small activations: these are exchanged in place of gradients, and each
rank keeps, updates and computes only its part of the weights, for the rows of all ranks' batches.

    division    a rank has               inputs      outputs      bytes of a pass, n rows a rank
    outputs     rows of the weight       all-gather  all-to-all   (R - 1) n (in + out / R)
    inputs      columns of the weight    all-to-all  sum          (R - 1) n (in / R + out)
    pair        outputs, then inputs     all-gather  sum          (R - 1) n (in + out)

A pair is two layers of an `nn.Sequential` with elementwise functions between, which are computed on
the parts. The parameters stay the objects that they were, with their part of the values; the state
dict has whole layers, under the names of the model.

Each rank's gradients are those of its own mean loss, times R after the sum over ranks that the
products make: the parts' gradients are divided by R, as the engine divides what it sums.
Sources: A. Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014;
M. Shoeybi et al., Megatron-LM, 2019 (outputs, then inputs).
"""

from paceline.training.tensor_parallel.checks import check_tensor_parallel
from paceline.training.tensor_parallel.choice import DividedLayer, choose_layers
from paceline.training.tensor_parallel.layers import TensorParallel

__all__ = ["DividedLayer", "TensorParallel", "check_tensor_parallel", "choose_layers"]
