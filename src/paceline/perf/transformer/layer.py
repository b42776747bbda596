"""What one transformer layer costs a rank: FLOPs, bytes moved, saved activations, collectives.

Counted for one microbatch of b samples with s tokens each on a rank; h hidden width, a heads, f
inner width, t tensor-parallel ranks, c context-parallel ranks. With S = s / c tokens a sample:

    products     q k v        S b x h x (h + 2 kv) / t        out     S b x h / t x h
                 up (gate)    S b x h x f / t (twice)         down    S b x f / t x h
    attention    two products of 2 S s b h / t FLOPs each, half of that with a causal kernel
    saved        Korthikanti et al.: s b h (10 + 24 / t + 5 a s / (h t)) bytes; with sequence
                 parallelism all divided by t; selective recomputation without the last term; full
                 recomputation 2 s b h
    traffic      operators that compute little read and write each activation once or more, see
                 `_shared_traffic`, `_divided_traffic`, `_score_traffic`

Sources: Korthikanti et al., Reducing activation recomputation in large transformer models, MLSys
2023 (arXiv 2205.05198), sections 4 and 5; Shoeybi et al., Megatron-LM (arXiv 1909.08053), section
3, for what tensor parallelism divides and the two all-reduces of each pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core.plan import Plan
    from paceline.perf.transformer.architecture import Architecture

ACTIVATION_BYTES = 2  # of bfloat16 and float16; float8 products keep 16-bit activations
TILE = 64  # elements; the tiles of large products
HEAD_TILE = 32  # elements; kernels for attention have tiles as narrow as its heads
FUSED_SAVING = 0.6  # of traffic that is left where a compiler fuses neighbours: 5 passes become 3


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of (rows x inner) by (inner x columns), `count` times."""

    rows: float
    inner: float
    columns: float
    count: int = 1

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.rows * self.inner * self.columns * self.count

    @property
    def elements(self) -> float:
        """Values read and written."""
        once = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return once * self.count

    @property
    def gradients(self) -> tuple[Product, Product]:
        """Products of the backward pass: the gradient of the rows, and that of the weights."""
        rows = Product(self.rows, self.columns, self.inner, self.count)
        return rows, Product(self.inner, self.rows, self.columns, self.count)

    def fits(self, tile: int) -> bool:
        """Return whether all dimensions are multiples of `tile` elements."""
        return not (self.rows % tile or self.inner % tile or self.columns % tile)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What one layer costs a rank for one microbatch.

    Attributes:
        products: of the forward pass; the backward pass has two of the same size for each.
        attention: FLOPs of the forward pass in a fused kernel; 0 if attention is not fused.
        scores: products of attention that is not fused.
        forward_traffic: bytes that other operators move in the forward pass.
        backward_traffic: the same of the backward pass.
        score_traffic: bytes of operators on attention scores in the forward pass.
        recompute_scores: whether the backward pass computes attention again.
        recompute_all: whether the backward pass computes the whole layer again.
        recompute_operators: whether it computes every second product again, and all that is none.
        saved_bytes: activations kept for the backward pass.
        working_bytes: of a layer's activations while it is computed (again).
        exchange_bytes: of one tensor-parallel all-reduce; two in each pass.
        ring_bytes: keys and values that context-parallel ranks pass on in the forward pass.
    """

    products: tuple[Product, ...]
    attention: float
    scores: tuple[Product, ...]
    forward_traffic: float
    backward_traffic: float
    score_traffic: float
    recompute_scores: bool
    recompute_all: bool
    recompute_operators: bool
    saved_bytes: float
    working_bytes: float
    exchange_bytes: float
    ring_bytes: float


def layer_work(model: Architecture, plan: Plan, samples: float) -> LayerWork:
    """Return the work of one layer on one rank for a microbatch of `samples`."""
    mesh = plan.mesh
    tensor, tokens = mesh.tensor, samples * model.sequence / mesh.context
    hidden, inner, kv = model.hidden, model.inner, model.kv_width
    products = (
        Product(tokens, hidden, (hidden + 2 * kv) / tensor),
        Product(tokens, hidden / tensor, hidden),
        Product(tokens, hidden, inner / tensor, 2 if model.gated else 1),
        Product(tokens, inner / tensor, hidden),
    )
    scores_flops = 4.0 * tokens * model.sequence * hidden / tensor
    if model.causal:
        scores_flops *= _causal_share(plan)
    fused = plan.fused_attention
    saved, working = activation_bytes(model, plan, samples)
    keep = FUSED_SAVING if plan.compiled else 1.0
    shared = tokens * hidden / (tensor if plan.sequence_parallel else 1)
    forward = shared * _shared_traffic(model, "forward")
    backward = shared * _shared_traffic(model, "backward")
    divided_forward, divided_backward = _divided_traffic(model)
    batch = samples * model.heads / tensor
    return LayerWork(
        products=products,
        attention=scores_flops if fused else 0.0,
        scores=()
        if fused
        else (
            Product(tokens / samples, model.head_width, model.sequence, max(1, round(batch))),
            Product(tokens / samples, model.sequence, model.head_width, max(1, round(batch))),
        ),
        forward_traffic=keep * (forward + tokens * divided_forward / tensor),
        backward_traffic=keep * (backward + tokens * divided_backward / tensor),
        score_traffic=0.0 if fused else _score_traffic(model) * tokens / tensor,
        recompute_scores=plan.recompute == "selective" and not fused,
        recompute_all=plan.recompute == "full",
        recompute_operators=plan.recompute == "operators",
        saved_bytes=saved,
        working_bytes=working,
        exchange_bytes=tokens * hidden * ACTIVATION_BYTES,
        ring_bytes=2 * tokens * kv / tensor * ACTIVATION_BYTES * (mesh.context - 1),
    )


def _causal_share(plan: Plan) -> float:
    """Return the share of the scores that the busiest context-parallel rank computes of its rows.

    Half of them if ranks have equal shares. With equal runs of tokens the last of c ranks computes
    1 - 1 / (2 c) of its rows' scores, and the others wait for it.
    """
    ranks = plan.mesh.context
    return 0.5 if plan.balanced_context else 1 - 1 / (2 * ranks)


def activation_bytes(model: Architecture, plan: Plan, samples: float) -> tuple[float, float]:
    """Return a layer's (saved bytes, bytes while it is computed) on a rank for `samples`.

    Source: Korthikanti et al. 2022, equations 1 to 4 and table 2: for h, 4 h and full heads, with
    dropout, the saved bytes are s b h (34 + 5 a s / h) without parallelism. The terms below are the
    same ones for other widths, without masks where there is no dropout.
    """
    mesh = plan.mesh
    tokens = samples * model.sequence / mesh.context
    hidden, inner, kv = model.hidden, model.inner, model.kv_width
    mask = 1 if model.dropout else 0
    # inputs of both norms and of both blocks; two masks
    shared = tokens * hidden * (8 + 2 * mask)
    # q, k, v and the input of the output projection; the activation's input and output. A gated one
    # has two inputs, and their product unless a compiler computes it again.
    inner_tensors = (3 if plan.compiled else 4) if model.gated else 2
    divided = tokens * (2 * hidden + 4 * kv + 2 * hidden + 2 * inner_tensors * inner)
    score_bytes = 2 + (2 + mask if model.dropout else 0)  # softmax; its dropout's output and mask
    scores = tokens * score_bytes * model.heads * model.sequence
    if plan.fused_attention:
        scores = tokens * 4 * model.heads  # a float of each row: log of the sum of exponentials
    shared /= mesh.tensor if plan.sequence_parallel else 1
    whole = shared + (divided + scores) / mesh.tensor
    inputs = tokens * hidden * 2 / (mesh.tensor if plan.sequence_parallel else 1)
    if plan.recompute == "full":
        return inputs, whole
    if plan.recompute == "operators":  # half of the products' outputs, and the layer's input
        outputs = (divided + tokens * hidden * 4) / 2
        return inputs + outputs / mesh.tensor, whole - outputs / mesh.tensor
    if plan.recompute == "selective" and not plan.fused_attention:
        return shared + divided / mesh.tensor, scores / mesh.tensor
    return whole, 0.0


def _shared_traffic(model: Architecture, phase: str) -> float:
    """Return bytes per token and hidden unit that norms, residuals and dropout move.

    Forward: a norm reads and writes (4), twice; a residual reads two and writes one (6), twice;
    dropout writes a mask (1), twice. Backward: a norm reads gradient and input and writes (6); the
    residual adds gradients (6); dropout reads its mask, reads and writes (5).
    """
    if phase == "forward":
        return 2 * 4 + 2 * 6 + (2 if model.dropout else 0)
    return 2 * 6 + 6 + (2 * 5 if model.dropout else 0)


def _divided_traffic(model: Architecture) -> tuple[float, float]:
    """Return bytes per token that the activation function and the layout of heads move.

    The activation reads and writes its width (4), in the backward pass it reads gradient and input
    and writes (6). A gated one multiplies by a second projection (6), and its gradient (10). The
    heads' outputs are joined (4); kernels read q, k and v where the product wrote them. Rotary
    positions widen q and k, multiply and narrow them (20).
    """
    heads = 4 * model.hidden
    if model.rotary:
        heads += 20 * (model.hidden + model.kv_width)
    forward, backward = (10, 16) if model.gated else (4, 6)
    return forward * model.inner + heads, backward * model.inner + heads


def _score_traffic(model: Architecture) -> float:
    """Return bytes per token that operators on attention scores move in a forward pass.

    Softmax with scale and mask reads and writes (4); a causal one reads half (3). Dropout reads,
    writes and has a mask (5). What the two products read and write is part of their own elements.
    """
    softmax = 3 if model.causal else 4
    return (softmax + (5 if model.dropout else 0)) * model.heads * model.sequence
