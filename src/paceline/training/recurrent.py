"""What a fused recurrent layer computes: one operator call, many products.

A layer of width h over T steps of a batch of B samples with i features has weights of shape (gh, i)
and (gh, h), g gates each::

    all steps at once     2 TB i gh FLOPs      the input's share of the gates
    each step, T times    2  B h gh FLOPs      the previous step's share
                          elementwise          the gates themselves

The steps depend on each other, so their products stay small: a rate for one large product would
promise too much. So a call counts as T pieces of the class ``recurrent``, each with its share of
all products. Backward, each product has two gradients, of its input and of its weight.

Source: Appleyard, Kocisky, Blunsom, Optimizing Performance of Recurrent Neural Networks on GPUs,
2016, section 2 (which products there are, and which can be merged); oneDNN's primitive does the
same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core.machine import Operator

Piece = tuple["Operator", int, int, int]  # class, count, FLOPs and bytes of one piece
_LAYER, _LAYER_BACKWARD = "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"


def pieces_of(name: str, args: Any) -> tuple[Piece, ...]:
    """Return the pieces of work of a recurrent layer's call; none for another operator.

    Args:
        name: of the operator, without namespace.
        args: of the call; the first three are the input, shape (T, B, i), or (TB, i) where the
            samples differ in length, and the weights, shapes (gh, i) and (gh, h).
    """
    if name not in (_LAYER, _LAYER_BACKWARD):
        return ()
    x, input_weight, weight = args[:3]
    gates, width = weight.shape
    steps, batch = _steps_and_batch(x, hidden=args[5], width=width)
    weights = input_weight.numel() + weight.numel()
    size = x.element_size()
    bytes_ = size * (weights + batch * (x.shape[-1] + 2 * gates + 3 * width))
    products = 1 if name == _LAYER else 2  # backward: gradients of the input and of the weight
    return (("recurrent", steps, products * 2 * batch * weights, products * bytes_),)


def _steps_and_batch(x: Any, *, hidden: Any, width: int) -> tuple[int, int]:
    """Return the number of time steps, and the samples of each, on average."""
    batch = max(1, hidden.numel() // width)
    steps = max(1, round(x.numel() / x.shape[-1] / batch))
    return steps, max(1, x.numel() // x.shape[-1] // steps)
