"""What a fused recurrent layer computes: one operator call, many products.

A layer of width h over T steps of a batch of B samples with i features has weights of shape (gh, i)
and (gh, h), g gates each::

    all steps at once     2 TB i gh FLOPs      the input's share of the gates
    each step, T times    2  B h gh FLOPs      the previous step's share
                          elementwise          the gates themselves

The steps depend on each other, so their products stay small: a rate for one large product would
promise too much. Backward, each product has two gradients, of its input and of its weight. That of
the recurrent weight is taken over all steps at once.

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
    whole = 2 * steps * batch  # FLOPs per weight over all steps
    per_step = 2 * batch
    size = x.element_size()
    input_bytes = size * (x.numel() + input_weight.numel() + steps * batch * gates)
    step_bytes = size * (weight.numel() + batch * (width + gates))
    gate_bytes = size * batch * (gates + 3 * width)
    if name == _LAYER:
        return (
            ("matmul", 1, whole * input_weight.numel(), input_bytes),
            ("matmul", steps, per_step * weight.numel(), step_bytes),
            ("transcendental", steps, 0, gate_bytes),
        )
    weight_bytes = size * (weight.numel() + steps * batch * (width + gates))
    return (
        ("matmul", 2, whole * input_weight.numel(), input_bytes),
        ("matmul", steps, per_step * weight.numel(), step_bytes),
        ("matmul", 1, whole * weight.numel(), weight_bytes),
        ("elementwise", steps, 0, 2 * gate_bytes),
    )


def _steps_and_batch(x: Any, *, hidden: Any, width: int) -> tuple[int, int]:
    """Return the number of time steps, and the samples of each, on average."""
    batch = max(1, hidden.numel() // width)
    steps = max(1, round(x.numel() / x.shape[-1] / batch))
    return steps, max(1, x.numel() // x.shape[-1] // steps)
