"""A Workload from a model: counts that are known by hand, and nothing run or changed."""

from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from paceline.core.errors import UsageError  # noqa: E402
from paceline.core.workload import Dataset  # noqa: E402
from paceline.training.capture import TrainingStep, capture  # noqa: E402


def flops(workload, layer, phase):
    (found,) = [candidate for candidate in workload.layers if candidate.name == layer]
    return sum(
        operation.flops * operation.count
        for operation in found.operations
        if operation.phase == phase
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def capture_cnn(**changes):
    step = {
        "module": small_cnn(),
        "inputs": torch.zeros(4, 3, 8, 8),
        "target": torch.zeros(4, dtype=torch.long),
        "loss_fn": F.cross_entropy,
        "optimizer": sgd,
    }
    return capture(TrainingStep(**(step | changes)), name="cnn")


def test_counts_of_a_cnn():
    workload = capture_cnn()
    assert (workload.name, workload.batch, workload.optimizer) == ("cnn", 4, "SGD")
    assert workload.input_bytes == 4 * 3 * 64 * 4 + 4 * 8
    assert workload.parameter_bytes == 4 * (8 * 27 + 8 + 8 + 8 + 512 * 10 + 10)
    assert workload.optimizer_bytes == workload.parameter_bytes  # momentum
    assert workload.buffer_bytes == 4 * 16 + 8
    conv = 2 * 4 * 64 * 8 * 27
    # The images need no gradient: the first convolution only makes that of its weight.
    assert flops(workload, "0", "forward") == flops(workload, "0", "backward") == conv
    linear = 2 * 4 * 512 * 10
    assert flops(workload, "4", "forward") == linear
    assert flops(workload, "4", "backward") == 2 * linear
    assert workload.flops == 2 * conv + 3 * linear


def test_operators_belong_to_their_layer_and_class():
    classes = {}
    for layer in capture_cnn().layers:
        for operation in layer.operations:
            classes.setdefault((layer.name, operation.phase), set()).add(operation.operator)
    assert classes["0", "forward"] == classes["0", "backward"] == {"convolution"}
    assert "batch_norm" in classes["1", "forward"]
    assert "batch_norm" in classes["1", "backward"]
    assert classes["2", "forward"] == classes["2", "backward"] == {"elementwise"}
    assert "softmax" in classes["", "forward"]
    assert classes["4", "optimizer"] == {"elementwise"}


def test_saved_activations_count_each_storage_once():
    # ReLU saves its result, which the next Linear saves as its input: one storage.
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    workload = capture(TrainingStep(module=module, inputs=torch.zeros(8, 16)))
    # The batch itself (saved by the first layer), the activation, and what the sum keeps: nothing.
    assert workload.saved_bytes == 8 * 16 * 4 + 8 * 32 * 4


def test_the_model_is_neither_run_nor_changed():
    calls = []
    module = small_cnn()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module[2].register_forward_hook(lambda _module, _inputs, output: calls.append(type(output)))
    capture_cnn(module=module)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert len(module[2]._forward_hooks) == 1
    assert all(kind is not torch.Tensor for kind in calls)


def test_shared_parameters_count_once():
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    module[1].weight = module[0].weight
    workload = capture(TrainingStep(module=module, inputs=torch.zeros(2, 8)))
    assert workload.parameter_bytes == 8 * 8 * 4


def test_frozen_parameters_are_held_and_not_trained():
    module = small_cnn()
    for parameter in module[0].parameters():
        parameter.requires_grad_(requires_grad=False)
    module[1].bias.requires_grad_(requires_grad=False)
    workload, all_trained = capture_cnn(module=module), capture_cnn()
    frozen_bytes = 4 * (8 * 27 + 8 + 8)
    assert workload.parameter_bytes == all_trained.parameter_bytes
    assert workload.trained_bytes == all_trained.parameter_bytes - frozen_bytes
    assert workload.optimizer_bytes == workload.trained_bytes  # momentum of what is trained
    layers = {layer.name: layer for layer in workload.layers}
    assert layers["0"].trained_bytes == ()
    assert layers["1"].trained_bytes == (4 * 8,)
    assert flops(workload, "0", "backward") == 0


def test_adam_and_attention():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 8)

        def forward(self, tokens):
            x = self.table(tokens)[:, None]
            return F.gelu(F.scaled_dot_product_attention(x, x, x))

    workload = capture(
        TrainingStep(
            module=Attends(),
            inputs=torch.zeros(3, 5, dtype=torch.long),
            optimizer=torch.optim.Adam,
            dataset=Dataset(samples_count=9, sample_bytes=40, seconds_per_sample=1e-4),
        )
    )
    product = 2 * 3 * 5 * 5 * 8
    assert workload.flops == product * (2 + 5)
    assert workload.optimizer_bytes >= 2 * workload.parameter_bytes
    assert "dataset.seconds_per_sample" in workload.measured
    found = {operation.operator for layer in workload.layers for operation in layer.operations}
    assert {"attention", "embedding", "transcendental"} <= found


def test_modules_with_several_inputs_and_outputs():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a, b):
            return {"sum": self.linear(a) + b["x"], "left": a}

    inputs = (torch.zeros(2, 4), {"x": torch.zeros(2, 4)})
    workload = capture(TrainingStep(module=Both(), inputs=inputs))
    assert workload.name == "Both"
    assert flops(workload, "linear", "forward") == 2 * 2 * 4 * 4


def test_dropout_is_random_and_recomputation_is_counted_in_its_phase():
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    workload = capture(TrainingStep(module=Again(), inputs=torch.zeros(2, 8, requires_grad=True)))
    matmul = 2 * 2 * 8 * 8
    assert workload.flops == matmul * (1 + 1 + 2)


def test_no_loss_and_data_dependent_models_are_explained():
    with pytest.raises(UsageError, match="no loss"):
        capture(TrainingStep(module=nn.Flatten(), inputs=torch.zeros(2, 2), loss_fn=torch.sum))

    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    with pytest.raises(UsageError, match="cannot be captured") as caught:
        capture(TrainingStep(module=Branches(), inputs=torch.zeros(2, 2, requires_grad=True)))
    assert "test_capture.py:" in caught.value.where
    assert "`return x if x.sum().item() > 0 else -x`" in caught.value.where


def test_a_model_that_branches_on_values_is_captured_where_it_may_run():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) if x.sum().item() > 0 else x

    module = Branches()
    before = module.layer.weight.clone()
    step = TrainingStep(
        module=module,
        inputs=torch.ones(2, 4),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    with pytest.raises(UsageError, match="cannot be captured") as caught:
        capture(step)
    assert "--compute measured" in caught.value.fix
    workload = capture(step, runs=True)
    assert any(
        operation.operator == "matmul"
        for layer in workload.layers
        for operation in layer.operations
    )
    assert torch.equal(module.layer.weight, before)  # a copy was trained


class Attends(nn.Module):
    """Fused attention with a table that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.scale = torch.ones(1)

    def forward(self, x):
        parts = [part.view(2, 64, 2, 16).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        return nn.functional.scaled_dot_product_attention(*parts, is_causal=True) * self.scale


def test_the_meta_device_is_captured_as_the_cpu_is():
    here = capture(TrainingStep(module=Attends(), inputs=torch.zeros(2, 64, 32)))
    with torch.device("meta"):
        meta = TrainingStep(module=Attends(), inputs=torch.zeros(2, 64, 32))
    assert capture(meta).layers == here.layers
    assert capture(meta).peak_bytes == here.peak_bytes


def test_passes_that_accumulate_are_counted_and_keep_the_activations_of_one():
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    settings = {"module": module, "inputs": torch.zeros(4, 8)}
    once, thrice = (capture(TrainingStep(**settings, accumulation=count)) for count in (1, 3))
    assert thrice.flops == 3 * once.flops
    assert thrice.saved_bytes == once.saved_bytes
    assert (once.accumulation, thrice.accumulation) == (1, 3)
    with pytest.raises(UsageError, match="accumulation must be at least 1"):
        TrainingStep(**settings, accumulation=0)


def test_the_peak_is_of_what_is_alive_at_the_same_time():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            for _ in range(4):  # nothing is saved: each result dies when the next one is there
                x = x.relu_() + 1.0
            return x * self.weight

    size = 1 << 20
    workload = capture(TrainingStep(module=Chain(), inputs=torch.zeros(size // 4)))
    assert 2 * size <= workload.peak_bytes < 4 * size


class Batch(NamedTuple):
    """Two inputs with names."""

    left: torch.Tensor
    right: torch.Tensor


def test_named_tuples_are_batches():
    module = torch.nn.Bilinear(3, 4, 1)
    found = capture(TrainingStep(module=module, inputs=Batch(torch.ones(2, 3), torch.ones(2, 4))))
    assert (found.batch, found.input_bytes) == (2, 56)


def test_batches_that_cannot_be_copied_are_explained():
    class Odd(list):
        def __init__(self):
            super().__init__([torch.ones(1)])

    with pytest.raises(UsageError, match="cannot be captured"):
        capture(TrainingStep(module=torch.nn.Identity(), inputs=Odd()))


# --- whose an error is --------------------------------------------------------------------------


class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(self.first(x))


def half_of(output, target):
    return nn.functional.cross_entropy(output, target[:2])


@pytest.mark.parametrize(
    ("changes", "what", "where", "why"),
    [
        (
            {"module": Uneven()},
            "forward pass fails on the inputs",
            "Uneven, layer second; ",
            "(4, 8)",
        ),
        ({"inputs": torch.zeros(4, 9)}, "forward pass fails on the inputs", "layer 0", "(4, 9)"),
        (
            {"loss_fn": half_of, "target": torch.zeros(4, dtype=torch.long)},
            "the loss function fails on the model's output",
            "half_of; ",
            "it was given float32 (4, 3), int64 (4,)",
        ),
        ({"loss_fn": lambda output: output}, "the loss is not one number", "Sequential", "(4, 3)"),
        (
            {"optimizer": lambda parameters: torch.optim.SGD(parameters, -1)},
            "the optimizer cannot be made",
            "test_capture.py:",
            "Invalid learning rate",
        ),
    ],
)
def test_an_error_says_whose_it_is_and_what_it_was_given(changes, what, where, why):
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    with pytest.raises(UsageError, match=what) as caught:
        capture(TrainingStep(**{"module": module, "inputs": torch.zeros(4, 8), **changes}))
    assert where in caught.value.where
    assert why in caught.value.why
