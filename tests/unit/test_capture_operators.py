"""Operators that a capture must count rightly, and batches of every form; counts known by hand."""

from collections import UserDict
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from paceline.core.errors import UsageError  # noqa: E402
from paceline.training.capture import TrainingStep, capture  # noqa: E402


def operations(workload, phase="forward"):
    return [
        operation
        for layer in workload.layers
        for operation in layer.operations
        if operation.phase == phase
    ]


def phase_flops(workload, phase):
    return sum(operation.flops * operation.count for operation in operations(workload, phase))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


# --- recurrent layers ----------------------------------------------------------------------------

STEPS, BATCH, FEATURES, WIDTH = 20, 8, 32, 64


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_fused_lstm_is_its_products_one_of_them_once_a_time_step(bidirectional):
    module = nn.LSTM(FEATURES, WIDTH, bidirectional=bidirectional)
    inputs = torch.zeros(STEPS, BATCH, FEATURES, requires_grad=True)
    workload = capture(TrainingStep(module=module, inputs=inputs))
    directions, gates = 1 + bidirectional, 4 * WIDTH
    weights = gates * (FEATURES + WIDTH)
    assert phase_flops(workload, "forward") == directions * 2 * STEPS * BATCH * weights
    assert phase_flops(workload, "backward") == 2 * phase_flops(workload, "forward")
    pieces = [
        (operation.count, operation.flops)
        for operation in operations(workload)
        if operation.operator == "recurrent"
    ]
    assert pieces == [(directions * STEPS, 2 * BATCH * weights)]


@pytest.mark.parametrize(("cell", "gates"), [(nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_that_torch_composes_of_others_have_all_their_products(cell, gates):
    inputs = torch.zeros(BATCH, STEPS, FEATURES, requires_grad=True)
    module = cell(FEATURES, WIDTH, batch_first=True)
    workload = capture(TrainingStep(module=module, inputs=inputs))
    weights = gates * WIDTH * (FEATURES + WIDTH)
    assert phase_flops(workload, "forward") == 2 * STEPS * BATCH * weights
    for phase in ("forward", "backward"):
        assert not any(operation.assumed for operation in operations(workload, phase))


# --- products without a formula in torch ---------------------------------------------------------


class Products(nn.Module):
    """Matrix times vector, and products that add to what is there."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 7, 5))

    def forward(self, x):
        matrix = self.weight[0]
        vectors = torch.mv(x[0], matrix[:, 0]) + torch.addmv(x[0, :, 0], x[0], matrix[:, 1])
        batched = torch.zeros(3, 4, 5).baddbmm_(x, self.weight)
        single = torch.zeros(4, 5).addmm_(x[0], matrix)
        return vectors.sum() + batched.sum() + single.sum() + torch.dot(matrix[0], matrix[1])


def test_products_with_vectors_and_in_place_are_priced():
    workload = capture(TrainingStep(module=Products(), inputs=torch.zeros(3, 4, 7)))
    expected = 2 * (2 * 4 * 7) + 3 * (2 * 4 * 7 * 5) + 2 * 4 * 7 * 5 + 2 * 5
    assert phase_flops(workload, "forward") == expected
    assert not any(operation.assumed for operation in operations(workload))


# --- what no class describes ---------------------------------------------------------------------


class Odd(nn.Module):
    """Sorts, and measures distances."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.sort(self.linear(x))[0].sum() + torch.cdist(x, self.linear(x)).sum()


def test_operators_that_no_class_describes_are_named():
    workload = capture(TrainingStep(module=Odd(), inputs=torch.zeros(3, 4)))
    named = [operation.assumed for operation in operations(workload) if operation.assumed]
    assert sorted(named) == ["aten._cdist_forward", "aten.sort"]


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adadelta"])
def test_ordinary_training_has_a_price_throughout(optimizer):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    module = nn.Sequential(nn.Embedding(8, 16), layer, nn.Linear(16, 8))
    workload = capture(
        TrainingStep(
            module=module,
            inputs=torch.zeros(2, 5, dtype=torch.long),
            target=torch.zeros(2, 5, 8),
            loss_fn=nn.functional.mse_loss,
            optimizer=getattr(torch.optim, optimizer),
        )
    )
    for phase in ("forward", "backward", "optimizer"):
        assert not [
            operation.assumed for operation in operations(workload, phase) if operation.assumed
        ]


# --- sparse gradients, and an optimizer that runs the model --------------------------------------

ROWS, COLUMNS, INDICES = 10_000, 8, 20


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_sparse_embedding_bag_moves_its_rows_and_not_its_table(mode):
    module = nn.EmbeddingBag(ROWS, COLUMNS, sparse=True, mode=mode)
    inputs = (torch.zeros(INDICES, dtype=torch.long), torch.arange(0, INDICES, 4))
    workload = capture(TrainingStep(module=module, inputs=inputs, optimizer=sgd))
    moved = sum(
        operation.bytes * operation.count
        for phase in ("forward", "backward", "optimizer")
        for operation in operations(workload, phase)
    )
    assert 0 < moved < ROWS * COLUMNS * 4
    assert workload.parameter_bytes == ROWS * COLUMNS * 4


class Repeats(torch.optim.SGD):
    """Runs the model in its step."""

    def step(self, closure):
        return closure()


def test_an_optimizer_that_runs_the_model_is_refused_with_what_to_plan_instead():
    step = TrainingStep(
        module=nn.Linear(3, 3), inputs=torch.zeros(2, 3), optimizer=lambda p: Repeats(p, lr=0.1)
    )
    with pytest.raises(UsageError, match="a step of Repeats cannot be predicted") as caught:
        capture(step)
    assert "closure" in caught.value.why
    assert "SGD" in caught.value.fix


def test_an_update_of_lbfgs_runs_the_model_once_an_iteration_and_keeps_its_history():
    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, max_iter=7, history_size=5)

    once = capture(TrainingStep(module=nn.Linear(3, 4), inputs=torch.zeros(2, 3), optimizer=sgd))
    many = capture(TrainingStep(module=nn.Linear(3, 4), inputs=torch.zeros(2, 3), optimizer=lbfgs))
    size = 4 * (3 * 4 + 4)
    assert phase_flops(many, "forward") == 7 * phase_flops(once, "forward")
    assert many.optimizer_bytes == (2 * 5 + 3) * size
    updates = [operation.count for operation in operations(many, "optimizer")]
    assert updates == [7 * 2 * 5, 7 * (2 * 5 + 10)]


# --- kinds of convolutions and of updates ---------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape", "operator"),
    [
        (nn.Conv2d(4, 8, 3), (2, 4, 8, 8), "convolution"),
        (nn.Conv2d(8, 8, 3, groups=2), (2, 8, 8, 8), "convolution"),
        (nn.Conv2d(8, 8, 3, groups=8), (2, 8, 8, 8), "depthwise"),
        (nn.ConvTranspose2d(4, 8, 3), (2, 4, 8, 8), "transposed"),
        (nn.Conv1d(4, 8, 3), (2, 4, 8), "convolution_1d"),
        (nn.GroupNorm(2, 4), (2, 4, 8), "group_norm"),
        (nn.Upsample(scale_factor=2, mode="bilinear"), (2, 4, 8, 8), "upsampling"),
    ],
)
def test_layers_with_kernels_of_their_own_have_a_class_of_their_own(layer, shape, operator):
    workload = capture(TrainingStep(module=layer, inputs=torch.zeros(shape, requires_grad=True)))
    for phase in ("forward", "backward"):
        assert operator in {operation.operator for operation in operations(workload, phase)}


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_an_update_of_a_list_counts_each_parameter(kind):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    workload = capture(
        TrainingStep(
            module=module,
            inputs=torch.zeros(2, 3),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1, **{kind: True}),
        )
    )
    updates = [
        operation for operation in operations(workload, "optimizer") if operation.operator == kind
    ]
    assert sum(operation.count for operation in updates) == 4
    assert not any(operation.assumed for operation in updates)


# --- batches -------------------------------------------------------------------------------------


class Labelled(nn.Module):
    """Takes its batch by keywords and returns its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs, labels=None):
        logits = self.linear(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_dict_is_the_keyword_arguments_and_the_models_own_loss_is_taken(kind):
    batch = kind(inputs=torch.zeros(3, 4), labels=torch.zeros(3, dtype=torch.long))
    workload = capture(TrainingStep(module=Labelled(), inputs=batch))
    assert (workload.batch, workload.input_bytes) == (3, 3 * 4 * 4 + 3 * 8)
    assert phase_flops(workload, "forward") == 2 * 3 * 4 * 2
    classes = {operation.operator for operation in operations(workload)}
    assert "softmax" in classes


class OneBatch(nn.Module):
    """Takes its batch as one argument."""

    def __init__(self, places):
        super().__init__()
        self.places = places
        self.linear = nn.Linear(4, 2)

    def forward(self, batch):
        return sum(self.linear(batch[place]) for place in self.places)


@pytest.mark.parametrize(
    ("places", "batch"),
    [
        (("left",), {"left": torch.zeros(3, 4)}),
        ((0, 1), [torch.zeros(3, 4), torch.zeros(3, 4)]),
    ],
)
def test_a_dict_or_list_that_is_one_argument_stays_one(places, batch):
    workload = capture(TrainingStep(module=OneBatch(places), inputs=batch))
    assert phase_flops(workload, "forward") == len(places) * 2 * 3 * 4 * 2


class Pair(NamedTuple):
    """Two inputs."""

    left: torch.Tensor
    right: torch.Tensor


@pytest.mark.parametrize("kind", [list, tuple, lambda items: Pair(*items)])
def test_a_list_or_tuple_is_the_arguments_where_the_model_takes_several(kind):
    batch = kind([torch.ones(2, 3), torch.ones(2, 4)])
    workload = capture(TrainingStep(module=nn.Bilinear(3, 4, 1), inputs=batch))
    assert (workload.batch, workload.input_bytes) == (2, 56)
