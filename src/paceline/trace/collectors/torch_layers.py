"""Times the layers of a model in some steps: forward passes, and when gradients are ready.

In the other steps nothing is added to what a step costs: calls of modules within a model pass as
before (`torch_phases`), and parameters have no hook. In a sampled step (`sampled_steps`) such calls
are timed, and for its backward pass each parameter gets a hook, which goes with it. Dynamo sees
neither: it compiles in the forward pass, and calls within compiled code are none at run time.

What the hooks take is measured by themselves. What their own clock does not see, the frames around
them, is measured once, in a loop, where they cost less than amid a step: it counts several times.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.native import monotonic_ns
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.sampled_steps import SampledSteps
from paceline.trace.collectors.torch_hooks import RecordedKind, around
from paceline.trace.collectors.torch_internals import Capability
from paceline.trace.format.events import MAIN, SAMPLED_LAYERS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from paceline.native import Recorder

SHARE, MOST_NS = 0.001, 20_000
LAYERS_MAX = 1000  # of a model; the outer ones first
_LAYER, _GRADIENT = int(Kind.LAYER), int(Kind.GRADIENT)
_FORWARD = int(Kind.FORWARD)
# How much more the frames around a hook cost amid a step than in a loop. With 16 what a sampled
# step says was 94 to 160 % of its additional CPU time, in steps of 1.5, 11 and 85 ms.
_COLD = 16
_TRIALS = 100


class OpenLayer(NamedTuple):
    """A call of a layer that is timed."""

    begin_ns: int
    name: int


class _Parameter(NamedTuple):
    """A parameter whose gradient is waited for, and the hook for it."""

    tensor: weakref.ref[Any]
    hook: Callable[[Any], None]


class LayerRecorder:
    """Used by the main thread alone, but for `_ready`, which backward's threads call.

    Args:
        recorder: of the rank.
        passed_on: the phases in which calls of modules pass; forward is taken out of it while
            they are timed.
        available: what this torch has.

    Attributes:
        timed: whether layers are timed; it stops when a hook fails.
        sampling: whether the open step is sampled.
    """

    def __init__(
        self, recorder: Recorder, passed_on: set[int], available: frozenset[Capability]
    ) -> None:
        self.timed = RecordedKind("times of layers, and when gradients are ready", self._stop)
        self.sampling = False
        self._recorder = recorder
        self._passed_on = passed_on
        self._has_gradient_hooks = Capability.GRADIENT_HOOKS in available
        self._steps = SampledSteps(SHARE, MOST_NS)
        self._cost_name = recorder.intern(SAMPLED_LAYERS)
        self._roots: dict[int, weakref.ref[Any]] = {}
        self._names: dict[int, tuple[weakref.ref[Any], int]] = {}  # of layers, by identity
        self._parameters: list[_Parameter] = []
        self._removals: list[Callable[[], None]] = []
        self._begin_ns = self._cost_ns = self._calls = 0
        self._frames_ns = 0  # around a hook; 0: not measured yet

    def next_step(self) -> float:
        """Return the first step from the next one on that begins or follows a sampled step."""
        if self.sampling:
            return 0
        return self._steps.next_step(self._recorder.step) if self.timed.on else math.inf

    def end_step(self, now_ns: int) -> None:
        """Note that a step ends now, as a part of it; the next one may be sampled."""
        if self.sampling:
            self._end_sample(now_ns)
        step = self._recorder.step + 1
        if self.timed.on and self._steps.is_sampled(step, now_ns):
            self._frames_ns = self._frames_ns or _frames_ns()
            self._begin_ns, self._cost_ns, self._calls = now_ns, 0, 0
            self.sampling = True
            self._passed_on.discard(_FORWARD)

    def _end_sample(self, now_ns: int) -> None:
        cost_ns = self._cost_ns + self._calls * self._frames_ns
        self._stop()
        self._recorder.record(int(Kind.COUNTER), MAIN, self._cost_name, now_ns, now_ns, cost_ns)
        self._steps.note_cost(self._recorder.step, self._begin_ns, cost_ns)

    def _stop(self) -> None:
        """Let calls pass again, and take hooks out."""
        self.sampling = False
        self._passed_on.add(_FORWARD)
        self.after_backward()

    pause = _stop

    def enter_model(self, module: torch.nn.Module) -> None:
        """Note that the outermost module is called, and learn the names of its parts once.

        Args:
            module: without what wraps it.
        """
        known = self._roots.get(id(module))
        if known is None or known() is not module:
            begin_ns = monotonic_ns()
            self._learn(module)
            self._cost_ns += monotonic_ns() - begin_ns

    def _learn(self, root: torch.nn.Module) -> None:
        # Several models of a script may have parts of one name.
        before = f"{type(root).__name__}." if self._roots else ""
        self._roots[id(root)] = weakref.ref(root)
        layers = [(name, layer) for name, layer in root.named_modules() if name]
        layers.sort(key=lambda item: item[0].count("."))
        for name, layer in layers[:LAYERS_MAX]:
            number = self._recorder.intern(before + name)
            self._names[id(layer)] = weakref.ref(layer), number
        parameters = sorted(root.named_parameters(), key=lambda item: item[0].count("."))
        for name, parameter in parameters[:LAYERS_MAX]:
            if parameter.requires_grad and parameter.is_leaf:
                size = parameter.numel() * parameter.element_size()
                number = self._recorder.intern(before + name)
                hook = functools.partial(self._ready, number, size)
                self._parameters.append(_Parameter(weakref.ref(parameter), hook))

    def open(self, module: torch.nn.Module) -> OpenLayer | None:
        """Begin to time the call of a module within a model; None if it has no name."""
        entered_ns = monotonic_ns()
        self._calls += 1
        known = self._names.get(id(module))
        if known is None or known[0]() is not module:
            return None
        begin_ns = monotonic_ns()
        self._cost_ns += begin_ns - entered_ns
        return OpenLayer(begin_ns, known[1])

    def close(self, layer: OpenLayer) -> None:
        """Record the call of a layer that ends now."""
        end_ns = monotonic_ns()
        self._recorder.record(_LAYER, MAIN, layer.name, layer.begin_ns, end_ns)
        self._cost_ns += monotonic_ns() - end_ns

    def before_backward(self) -> None:
        """Have the parameters say when their gradients are ready."""
        if not self._has_gradient_hooks or internals.compiles_backward():
            return
        begin_ns = monotonic_ns()
        for tensor, hook in self._parameters:
            parameter = tensor()
            if parameter is not None and parameter.requires_grad:
                self._removals.append(internals.see_gradient(parameter, hook))
        self._cost_ns += monotonic_ns() - begin_ns

    def after_backward(self) -> None:
        """Take the parameters' hooks out again."""
        if self._removals:
            begin_ns = monotonic_ns()
            while self._removals:
                self._removals.pop()()
            self._cost_ns += monotonic_ns() - begin_ns

    def _ready(self, name: int, size_bytes: int, _parameter: object) -> None:
        self.timed.attempt(self._note_ready, name, size_bytes, monotonic_ns())

    def _note_ready(self, name: int, size_bytes: int, now_ns: int) -> None:
        self._recorder.record(_GRADIENT, MAIN, name, now_ns, now_ns, size_bytes)
        self._calls += 1
        self._cost_ns += monotonic_ns() - now_ns


def _frames_ns() -> int:
    """Return what the frames around a hook take amid a step, nanoseconds."""

    def nothing() -> None:
        pass

    hooked = around(nothing, RecordedKind(""), lambda *_: 0, lambda *_: None)
    taken = []
    for function in (hooked, nothing):
        begin_ns = monotonic_ns()
        for _ in range(_TRIALS):
            function()
        taken.append(monotonic_ns() - begin_ns)
    return max(1, _COLD * (taken[0] - taken[1]) // _TRIALS)
