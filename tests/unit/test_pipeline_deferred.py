"""Backward passes in two parts: first what other stages wait for, then the weights."""

import gc
import weakref

import pytest
import torch
from torch import nn

from paceline.training.pipeline.deferred import DeferredGradients

LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (2, 5, 4)),
    "no bias": (lambda: nn.Linear(4, 3, bias=False), (5, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=(1, 0), groups=2), (2, 4, 7, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, dilation=2, bias=False), (1, 2, 4, 5, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_second_part_brings_what_the_first_left_out(name):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make().double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    output = layer(x)
    seed = torch.randn_like(output)
    wanted = torch.autograd.grad(output, [x, *layer.parameters()], seed)
    deferred = DeferredGradients()
    with deferred:
        output = layer(x)
    output.backward(seed)
    assert torch.equal(x.grad, wanted[0])
    assert all(parameter.grad is None for parameter in layer.parameters())
    for _ in range(2):  # what was computed is not computed again
        deferred.compute()
    for parameter, gradient in zip(layer.parameters(), wanted[1:], strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("end", ["compute", "clear"])
@pytest.mark.parametrize("make", [nn.Linear, lambda *sizes: nn.Conv1d(*sizes, 1)])
def test_the_graph_does_not_outlive_the_second_part(make, end):
    first, second = make(4, 4), make(4, 4)
    deferred = DeferredGradients()
    with deferred:
        middle = first(torch.randn(1, 4, 4, requires_grad=True))
        output = second(middle.tanh())  # garbage collection does not see through this node
    node = weakref.ref(middle.grad_fn)
    output.sum().backward()
    del middle, output
    getattr(deferred, end)()
    gc.collect()
    assert node() is None


@pytest.mark.parametrize("case", ["frozen", "input", "functional", "text padding"])
def test_other_calls_are_left_as_they_are(case):
    layer = nn.Conv2d(2, 2, 3, padding="same" if case == "text padding" else 1)
    x = torch.randn(1, 2, 4, 4, requires_grad=case != "input")
    weight = layer.weight * 1 if case == "functional" else layer.weight
    if case == "frozen":
        layer.requires_grad_(False)
    with DeferredGradients():
        y = nn.functional.conv2d(x, weight, layer.bias, padding=layer.padding)
    y.sum().backward()
    assert (layer.weight.grad is None) == (case == "frozen")
    assert (x.grad is None) == (case == "input")
