"""Capturing a model as a graph and cutting it into stages, without any rank."""

import functools
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.core.errors import UsageError
from paceline.training import prepare
from paceline.training.batch_norm import batch_norms
from paceline.training.pipeline.costs import layer_costs
from paceline.training.pipeline.graph import bind_inputs, capture
from paceline.training.pipeline.microbatches import joined, sizes_of, split
from paceline.training.pipeline.stages import cut

sys.path.append(str(Path(__file__).parents[1] / "integration/scripts"))
from pipeline_models import Library, LibraryOutput  # where the ranks import them


class Chooses(nn.Module):
    """Its control flow depends on values."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            return self.high(x)
        return self.low(x)


class Holds(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(4, 4), inner, nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.inner(torch.relu(self.stem(x))))


class Detached(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            scale = x.abs().max()
        return x / scale


class Dropped(nn.Module):
    def forward(self, x):
        return functional.dropout(x, 0.5, training=self.training)


class Places(nn.Module):
    """Asks for the size of its input before it calls a submodule."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.output = nn.Linear(4, 2)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1])
        return self.output(self.embedding(tokens + places % 2))


def run_stages(staged, **inputs):
    """Return what the stages compute one after another."""
    values = {}
    for stage in staged.stages:
        given = [inputs[name] for name in stage.inputs] + [values[n] for n in stage.received]
        results = stage.module(*given)
        values |= dict(zip(stage.outputs, results, strict=False))
    return results[-1]


def test_control_flow_that_depends_on_values_names_its_line_and_offers_split_points():
    with pytest.raises(UsageError) as caught:
        capture(Chooses())
    problem = caught.value
    assert problem.what == "the forward pass of the model cannot be captured as a graph"
    assert "test_pipeline_graph.py:" in problem.where
    assert "`if x.sum() > 0:`" in problem.where
    assert "control flow" in problem.why
    assert "split_points=['low', 'high']" in problem.fix


def test_a_model_that_cannot_be_exported_either_has_one_short_error(capsys):
    with pytest.raises(UsageError, match="cannot be captured as a graph") as caught:
        capture(Chooses(), torch.ones(3, 4))
    assert "torch.export: " in caught.value.why
    assert caught.value.__suppress_context__
    assert capsys.readouterr().err == ""  # torch prints its graph


def test_what_precedes_the_first_submodule_belongs_to_its_layer():
    assert [layer.name for layer in capture(Places()).layers] == ["embedding", "output"]


def test_a_hidden_context_in_the_outermost_forward_pass_is_refused():
    with pytest.raises(UsageError, match="it uses no_grad, which a graph does not have"):
        capture(Detached())


@pytest.mark.parametrize("inner", [Chooses, Detached, Dropped])
def test_a_submodule_that_cannot_be_traced_stays_whole(inner):
    model = Holds(inner())
    captured = capture(model)
    assert [layer.name for layer in captured.layers] == ["stem", "inner", "head"]
    assert list(captured.opaque) == ["inner"]
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    assert torch.equal(run_stages(cut(captured, [1, 2]), x=x), expected)


def test_the_modules_around_one_that_cannot_be_traced_are_divided():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Chooses(), nn.Linear(4, 4)))
    captured = capture(model)
    assert [layer.name for layer in captured.layers] == ["0", "1.0", "1.1"]
    assert list(captured.opaque) == ["1.0"]


def without_gradients(function):
    @functools.wraps(function)
    def call(*args):
        with torch.no_grad():
            return function(*args)

    return call


def draws_python(x, _module):
    return x * random.random()  # what is to be seen


def draws_numpy(x, _module):
    return x * float(np.random.random())


def draws_torch(x, _module):
    return x * torch.rand(4)


def follows_mode(x, module):
    return functional.dropout(x, 0.5, training=module.training)


@without_gradients
def detached(x, _module):
    return x * 2


def in_bfloat16(x, _module):
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(x, torch.eye(4))


def asks_gradients(x, _module):
    return x * 2 if torch.is_grad_enabled() else x


def asks_for_a_class(x, module):
    return x if isinstance(x, torch.Tensor) else -x  # a Proxy is none


HIDDEN = {
    asks_for_a_class: "isinstance",
    draws_python: "random numbers",
    draws_numpy: "random numbers",
    draws_torch: "random numbers",
    follows_mode: "training",
    detached: "no_grad",
    in_bfloat16: "autocast",
    asks_gradients: "is_grad_enabled",
}


class Calls(nn.Module):
    """Its forward pass does nothing hidden by itself, but what it calls does."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x, self)


@pytest.mark.parametrize("function", HIDDEN)
def test_what_a_graph_does_not_have_is_seen_in_functions_that_a_forward_pass_calls(function):
    model = Holds(Calls(function))
    states = random.getstate(), torch.get_rng_state()
    captured = capture(model)
    assert [layer.name for layer in captured.layers] == ["stem", "inner", "head"]
    assert f"it uses {HIDDEN[function]}" in captured.opaque["inner"]
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert type(nn.Linear(1, 1).training) is bool
    assert isinstance.__module__ == "builtins"
    if function is not follows_mode:
        with pytest.raises(UsageError, match=f"it uses {HIDDEN[function]}, which a graph"):
            capture(Calls(function))


def test_an_exported_model_that_draws_from_python_is_refused():
    class Draws(Chooses):
        def forward(self, x):
            return self.low(x) * random.random() if x.shape[0] else x  # is seen

    with pytest.raises(UsageError, match="draws from Python's random numbers"):
        capture(Draws(), torch.randn(2, 4))


def test_dropout_in_a_submodule_keeps_following_the_mode():
    model = Holds(Dropped())
    staged = cut(capture(model), [2])
    model.eval()
    x = torch.randn(3, 4)
    assert torch.equal(run_stages(staged, x=x), model(x))


def test_a_mode_that_the_outermost_forward_pass_asks_for_is_known():
    assert capture(Dropped()).mode is True
    assert capture(Dropped().eval()).mode is False
    assert capture(Holds(Dropped())).mode is None


def test_split_points_make_up_a_model_that_cannot_be_captured():
    class Model(Chooses):
        def forward(self, x):
            return self.high(self.low(x)) if x.sum() != 0 else x

    model = Model()
    staged = cut(capture(model, split_points=["low", "high"]), [1])
    x = torch.randn(2, 4)
    assert torch.equal(run_stages(staged, **bind_inputs(model, x).arguments), model(x))
    with pytest.raises(UsageError, match=r"no submodule 'lower'"):
        capture(model, split_points=["lower"])
    with pytest.raises(UsageError, match=r"high.weight is in none of the split points"):
        capture(model, split_points=["low"])


def test_parameters_are_those_of_the_model_by_name():
    model = Holds(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)))
    stages = cut(capture(model), [1, 2]).stages
    held = {name: p for stage in stages for name, p in stage.parameters.items()}
    assert {name: id(p) for name, p in held.items()} == {
        name: id(p) for name, p in model.named_parameters()
    }


def test_no_cut_parts_a_tensor_from_an_operator_that_changes_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU())
    assert [layer.name for layer in capture(model).layers] == ["0", "2", "3"]


def test_edges_skip_stages_and_each_value_is_sent_once_to_each_stage():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            first = self.parts[0](x)
            second = self.parts[1](first)
            third = self.parts[2](second)
            return self.parts[3](third + first) + first

    staged = cut(capture(Skips()), [1, 2, 3])
    edges = [(edge.source, edge.destination) for edge in staged.edges]
    assert sorted(edges) == [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)]  # + is of its left's layer


def test_tied_weights_are_parameters_of_both_stages():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.middle = nn.Embedding(5, 4), nn.Linear(4, 4)

        def forward(self, tokens):
            return functional.linear(self.middle(self.table(tokens)), self.table.weight)

    staged = cut(capture(Tied()), [1, 2])
    shared = {name: stages for name, stages in staged.stages_of.items() if len(stages) > 1}
    assert shared == {"table.weight": (0, 2)}


def test_arguments_that_the_example_leaves_out_have_their_defaults():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, mask=None):
            y = self.layer(x)
            return y if mask is None else y * mask

    model, x, mask = Masked(), torch.randn(2, 4), torch.randn(2, 4)
    assert capture(model, x).inputs == ("x",)
    both = capture(model, {"x": x, "mask": mask})
    assert torch.equal(run_stages(cut(both, []), x=x, mask=mask), model(x, mask))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_that_is_not_divided_takes_arguments_by_name(precision):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, left, right):
            return self.layer(left - right)

    model, target = Named(), torch.randn(2, 4)
    inputs = {"right": torch.randn(2, 4), "left": torch.randn(2, 4)}
    loss_fn = functional.mse_loss
    prepared = prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=loss_fn, precision=precision
    )
    loss = prepared.forward_backward(inputs, target)
    assert torch.equal(loss, loss_fn(model(**inputs), target))


def test_layers_cost_what_they_compute_and_edges_what_they_carry():
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1))
    costs = layer_costs(capture(model), torch.zeros(4, 3, 32, 32))
    assert costs.forward_s[1] / costs.forward_s[0] == pytest.approx(64 / 3, rel=0.3)
    assert [tuple(edge) for edge in costs.edges] == [(0, (1,), 4 * 64 * 32 * 32 * 4)]
    assert not any(p.is_meta for p in model.parameters())


def test_counting_costs_changes_neither_statistics_nor_the_state_of_random_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before, state = model[1].running_mean.clone(), torch.get_rng_state()
    layer_costs(capture(model), torch.randn(8, 4))
    torch.manual_seed(0)
    torch.set_rng_state(state)
    layer_costs(capture(model), torch.zeros(8, 4))
    assert torch.equal(model[1].running_mean, before)
    assert int(model[1].num_batches_tracked) == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_microbatches_differ_by_one_sample_at_most():
    assert sizes_of(7, 4) == [2, 2, 2, 1]
    assert sizes_of(3, 4) == [1, 1, 1]
    parts = split({"x": torch.arange(7), "mask": torch.ones(1, 3)}, [4, 3])
    assert parts[1]["x"].tolist() == [4, 5, 6]
    assert parts[1]["mask"].shape == (1, 3)


def test_outputs_of_microbatches_are_joined_along_the_samples():
    parts = [{"y": torch.full((size, 3), float(size)), "scale": torch.ones(3)} for size in (3, 2)]
    whole = joined(parts, [3, 2])
    assert whole["y"][:, 0].tolist() == [3.0, 3.0, 3.0, 2.0, 2.0]
    assert whole["scale"].shape == (3,)


@pytest.fixture(scope="module")
def library():
    """A model that decides in Python, and its graph."""
    torch.manual_seed(0)
    model = Library(dropout=0.5)
    inputs = {"tokens": torch.randint(0, 11, (2, 6)), "mask": torch.ones(2, 6)}
    return model, capture(model, {**inputs, "is_causal": False})


def test_a_model_that_decides_in_python_is_divided_by_its_modules(library):
    model, captured = library
    names = [f"core.layers.{n}.{part}" for n in range(3) for part in ("norm", "project", "out")]
    assert [layer.name for layer in captured.layers] == [
        *("core.tokens", "core.places"),
        *names,
        "core.tokens",
    ]
    staged = cut(captured, [4, 8])
    assert staged.stages_of["core.tokens.weight"] == (0, 2)
    held = {name: p for stage in staged.stages for name, p in stage.parameters.items()}
    assert {name: id(p) for name, p in held.items()} == {
        name: id(p) for name, p in model.named_parameters()
    }
    costs = layer_costs(captured, {"tokens": torch.zeros(2, 6).long(), "mask": torch.ones(2, 6)})
    assert costs.parameter_bytes[1] == 4 * model.core.places.weight.nbytes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("samples", "length"), [(1, 6), (5, 6), (3, 9)])
def test_an_exported_model_follows_modes_and_takes_batches_of_any_size(
    library, training, samples, length
):
    model, captured = library
    staged = cut(captured, [3, 6])
    model.train(training)
    inputs = {
        "tokens": torch.randint(0, 11, (samples, length)),
        "mask": torch.ones(samples, length),
    }
    inputs["mask"][:, 4:] = 0
    torch.manual_seed(0)
    expected = model(**inputs, is_causal=False).logits
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(0)
    returned = run_stages(staged, **inputs, is_causal=False)
    assert isinstance(returned, LibraryOutput)
    assert returned.states is None
    assert torch.allclose(returned.logits, expected)
    returned.logits.sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)
    model.zero_grad()


def test_a_batch_that_an_exported_graph_is_not_made_for_is_refused(library):
    example = library[1].example
    tokens = torch.zeros(3, 5, dtype=torch.long)
    given = {"tokens": tokens, "mask": torch.ones(3, 5), "is_causal": False}
    example.check(given)
    with pytest.raises(UsageError, match="captured for another is_causal") as caught:
        example.check({**given, "is_causal": True})
    assert caught.value.why == "True, where the graph is for False"
    with pytest.raises(UsageError, match="captured for another mask"):
        example.check({**given, "mask": torch.ones(3, 1, 5)})
    with pytest.raises(UsageError, match="captured for another tokens"):
        example.check({"mask": given["mask"], "is_causal": False})


class Asking(nn.Module):
    """Computes something else where a question about its inputs' sizes has another answer."""

    def __init__(self, question):
        super().__init__()
        self.question = question
        self.low = nn.Linear(4, 4)

    def forward(self, x, mask):
        y = self.low(x) + mask
        return y * 2 if self.question(x) else y


@pytest.mark.parametrize(
    ("question", "sizes", "said"),
    [
        (lambda x: x.shape[1] > 8, (3, 9), r"x.shape\[1\] is 9; .* for x.shape\[1\] <= 8 only"),
        (lambda x: x.shape[1] == 1, (3, 1), r"x.shape\[1\] is 1; .* for x.shape\[1\] != 1 only"),
        (
            lambda x: x.shape[0] % 2 == 0,
            (3, 6),
            r"shape\[0\] is 3; .* for Mod\(.*shape\[0\], 2\) == 0 only",
        ),
        (lambda x: len(x) == 6, (3, 6), r"shape\[0\] is 3; .*shape\[0\] == 6 only"),
    ],
)
def test_sizes_for_which_a_model_computes_something_else_are_refused(question, sizes, said):
    inputs = {"x": torch.randn(6, 5, 4), "mask": torch.ones(6, 1, 4)}
    model = Asking(question)
    example = capture(model, inputs).example
    example.check(inputs)
    more = {"x": torch.randn(6, 7, 4), "mask": torch.ones(6, 1, 4)}
    example.check(more)
    assert torch.equal(run_stages(cut(capture(model, inputs), []), **more), model(**more))
    other = {"x": torch.randn(*sizes, 4), "mask": torch.ones(sizes[0], 1, 4)}
    with pytest.raises(UsageError, match=said):
        example.check(other)
    with pytest.raises(UsageError, match=r"x.shape\[2\] is 3; .* x.shape\[2\] == 4 only|any, 4"):
        example.check({**more, "x": torch.randn(6, 7, 3)})


def test_the_sizes_of_microbatches_are_those_that_are_asked_for():
    inputs = {"x": torch.randn(6, 5, 4), "mask": torch.ones(6, 1, 4)}
    example = capture(Asking(lambda x: x.shape[0] >= 4), inputs).example
    whole = {"x": torch.randn(12, 5, 4), "mask": torch.ones(12, 1, 4)}
    for _ in range(2):
        example.check(whole, 3)
    with pytest.raises(UsageError, match=r"in a microbatch mask.shape\[0\] is 3"):
        example.check(whole, 4)
    with pytest.raises(UsageError, match=r"in a microbatch mask.shape\[0\] is 3"):
        example.check({key: value[:10] for key, value in whole.items()}, 3)
    assert example.most_microbatches(whole, 8) == 3
    assert example.most_microbatches({key: value[:10] for key, value in whole.items()}, 3) == 2
    assert example.most_microbatches({key: value[:10] for key, value in whole.items()}, 3) == 2
    with pytest.raises(UsageError, match=r"in a microbatch mask.shape\[0\] is 1"):
        example.most_microbatches({key: value[:3] for key, value in whole.items()}, 3)
    fixed = capture(Asking(lambda x: len(x) == 6), inputs).example
    fixed.check(whole, 2)
    with pytest.raises(UsageError, match=r"shape\[0\] is 12; .*shape\[0\] == 6 only"):
        fixed.check(whole)


def test_operators_that_ask_for_sizes_themselves_take_one_sample():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            if x.shape[2] != 8:
                return x
            mixed, _ = self.mix(x, x, x, need_weights=False)
            return self.out(mixed).reshape(x.shape[0] * x.shape[1], -1)

    model = Attention()
    captured = capture(model, {"x": torch.randn(4, 5, 8)})
    assert captured.example is not None
    for samples, length in ((1, 5), (3, 7), (1, 2)):
        x = torch.randn(samples, length, 8)
        captured.example.check({"x": x})
        assert torch.allclose(run_stages(cut(captured, []), x=x), model(x), atol=1e-6)


def test_an_operator_that_removes_dims_of_one_element_takes_no_single_sample():
    class Squeezed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Linear(4, 1)

        def forward(self, x):
            y = self.low(x).squeeze()
            return y[0] if y.dim() < 2 else y[:, 0]

    captured = capture(Squeezed(), {"x": torch.randn(6, 5, 4)})
    captured.example.check({"x": torch.randn(2, 3, 4)})
    with pytest.raises(UsageError, match=r"x.shape\[0\] is 1"):
        captured.example.check({"x": torch.randn(1, 5, 4)})


def test_a_tensor_that_is_given_twice_is_two_arguments():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Linear(4, 4)

        def forward(self, x, target):
            if x.shape[0] > 0:
                return self.low(x) - target
            return x

    same = torch.randn(3, 4)
    model = Loss()
    captured = capture(model, {"x": same, "target": same})
    other = {"x": torch.randn(5, 4), "target": torch.randn(5, 4)}
    captured.example.check(other)
    assert torch.allclose(run_stages(cut(captured, []), **other), model(**other))


def test_a_dict_may_be_the_only_argument_beside_others_by_name():
    class Takes(nn.Module):
        def forward(self, features, **options):
            return features["tokens"]

    batch = {"tokens": torch.zeros(2, 3)}
    assert bind_inputs(Takes(), batch).arguments == {"features": batch}
    assert set(bind_inputs(Takes(), {"features": 1, "scale": 2}).kwargs) == {"scale"}


def test_a_layer_with_a_forward_pass_of_its_own_is_not_synchronised():
    class Activated(nn.BatchNorm2d):
        def forward(self, x):
            return torch.relu(super().forward(x))

    assert len(batch_norms(nn.Sequential(nn.BatchNorm2d(2), nn.SyncBatchNorm(2)))) == 2
    with pytest.raises(UsageError, match="the layer 1 has a forward pass of its own"):
        batch_norms(nn.Sequential(nn.Conv2d(1, 2, 1), Activated(2)))


def test_a_model_that_returns_an_object_cannot_be_exported():
    class Cache:
        pass

    class Caches(Chooses):
        def forward(self, x):
            return (self.low(x), Cache()) if x.shape[0] else x

    with pytest.raises(UsageError, match="the model returns a Cache, which is no tensor"):
        capture(Caches(), torch.randn(2, 4))


def test_no_cut_parts_a_tensor_from_an_exported_operator_that_changes_it():
    class Changes(Chooses):
        def forward(self, x):
            y = self.low(x) if x.shape[0] else x
            z = self.high(x)
            y.view(-1).mul_(2)
            return y + z

    first, *_ = capture(Changes(), torch.randn(2, 4)).layers
    assert [node.name for node in first.nodes] == ["linear", "linear_1", "view", "mul_"]
