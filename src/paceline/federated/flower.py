"""A federation on Flower: its transport and its nodes, our rounds and selection.

    server app                                       client app (one process per message)
    serve(grid, ...)  -- query: who are you? ------> samples, claimed memory
                      -- train: model, version ----> train(parameters) -> update
      FederationServer <-- update, what it took ---  or: too little memory

Flower's own strategies wait for a whole round; this loop pushes and pulls messages itself, so that
late answers count and new clients start as soon as others have ended. Flower gives the nodes their
ids; with `--enable-supernode-auth` a node without a registered key gets none.

Tested with flwr 1.41; only its public modules are used. The only file here that imports it.
"""

from __future__ import annotations

import math
import resource
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline.core.clock import SystemClock
from paceline.core.errors import DeadlineExceeded, Missing
from paceline.federated.clients import Profiler, Timing
from paceline.federated.rounds import CancelClient, RoundController
from paceline.federated.server import FederationServer
from paceline.federated.updates import ModelUpdate

try:
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
except ImportError as problem:
    raise Missing(
        "Flower is not installed",
        why=str(problem),
        fix="Run `pip install 'paceline[federated]'`; `paceline fed simulate` works without it",
    ) from problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from flwr.app import Context
    from flwr.serverapp import Grid

    from paceline.federated.monitor import Evaluation
    from paceline.federated.strategies import Strategy

PROFILE = "query.profile"
TRAIN = "train"
_POLL_S = 0.2
_NODES_S = 2.0  # between two looks for new nodes
_PROFILE_S = 60.0  # a node that has not said who it is by then is asked again
_MOST_CLIENTS = 1000
_MALFORMED = (KeyError, TypeError, ValueError, OverflowError)  # of what a client sends
_MOST_SAID = 200  # characters of what a client says
# Flower's codes of errors: the message or its answer has expired, the node is not connected.
_LEFT = frozenset((3, 4, 5))


class LocalWork(NamedTuple):
    """What a client's training came to.

    Attributes:
        parameters: after it; float32, shape (parameters,).
        samples: that it trained on.
        steps: of its optimizer.
        loss: root mean square of the samples' losses.
        accuracy: of the given parameters on the client's samples; nan: not known.
        peak_bytes: of memory, for example of its GPU; 0: the peak of the process counts.
    """

    parameters: np.ndarray
    samples: int
    steps: int
    loss: float
    accuracy: float = math.nan
    peak_bytes: int = 0


def make_client_app(
    samples: Callable[[Context], int],
    train: Callable[[np.ndarray, Context], LocalWork],
    *,
    free_bytes: Callable[[Context], int] | None = None,
) -> ClientApp:
    """Return a client app that answers `serve`.

    Args:
        samples: returns how many samples the client has.
        train: trains from the given parameters, float32 of shape (parameters,). A MemoryError, or
            torch's error for the same, becomes a message that the memory does not suffice: the
            client is asked again after a pause.
        free_bytes: returns the memory that the client has to spare; None: it claims nothing.
    """
    app = ClientApp()

    @app.query("profile")  # type: ignore[untyped-decorator,unused-ignore]  # flwr is not here
    def profile(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"samples": samples(context)})
        if free_bytes is not None:
            metrics["free_bytes"] = free_bytes(context)
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator,unused-ignore]
    def work(message: Message, context: Context) -> Message:
        begin = time.monotonic()
        (before,) = message.content["model"].to_numpy_ndarrays()
        try:
            done = train(before, context)
        except (MemoryError, RuntimeError) as problem:
            if not _is_out_of_memory(problem):
                raise
            refusal = ConfigRecord({"memory": str(problem) or type(problem).__name__})
            return Message(RecordDict({"refusal": refusal}), reply_to=message)
        metrics = MetricRecord(
            {
                "samples": done.samples,
                "steps": done.steps,
                "loss": done.loss,
                "accuracy": done.accuracy,
                "compute_s": time.monotonic() - begin,
                "peak_bytes": done.peak_bytes or _peak_bytes(),
            }
        )
        delta = (done.parameters - before).astype(np.float32)
        content = {"update": ArrayRecord([delta]), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    return app


def _is_out_of_memory(problem: Exception) -> bool:
    """Return whether an error says that memory does not suffice; torch is not imported for it."""
    return isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError"


def _peak_bytes() -> int:
    """Return the most memory that this process has had; Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(
    grid: Grid,
    strategy: Strategy,
    model: np.ndarray,
    evaluate: Callable[[float, int, np.ndarray], Evaluation],
    *,
    rounds: int,
    least_clients: int = 2,
    timeout_s: float = 3600.0,
    seed: int = 0,
) -> FederationServer:
    """Train a model with Flower's nodes; return the server with the model and its evaluations.

    Args:
        grid: of the server app.
        strategy: how the federation is run.
        model: parameters to begin with; float32, shape (parameters,).
        evaluate: returns the evaluation of a model, given seconds, version and parameters.
        rounds: new models.
        least_clients: to wait for before the first round.
        timeout_s: of it all.
        seed: of selection.

    Raises:
        DeadlineExceeded: too few clients came, or too few answered.
    """
    federation = _Federation(grid, strategy, model, evaluate, seed)
    return federation.run(rounds, least_clients, timeout_s)


class _Asked(NamedTuple):
    """A message that waits for its answer; version -1: who are you?"""

    node: int
    version: int
    sent_s: float


class _Federation:
    """The loop of `serve`."""

    def __init__(
        self,
        grid: Grid,
        strategy: Strategy,
        model: np.ndarray,
        evaluate: Callable[[float, int, np.ndarray], Evaluation],
        seed: int,
    ) -> None:
        self._grid, self._clock = grid, SystemClock()
        self._model_bytes = model.nbytes
        self._begin_s = self._clock.now_s()
        self._number_of: dict[int, int] = {}  # by node
        self._node_of: list[int] = []
        self._samples = np.ones(_MOST_CLIENTS)
        self._is_online = np.zeros(_MOST_CLIENTS, bool)
        self._asked: dict[str, _Asked] = {}  # by id of the message
        self._looked_s = -_NODES_S
        controller = RoundController(
            strategy.rounds,
            strategy.make_selector(np.random.Generator(np.random.Philox(seed))),
            Profiler(_MOST_CLIENTS),
            self._samples,
            2 * model.nbytes,
        )
        self.server = FederationServer(
            controller,
            model,
            self._samples,
            name_of=lambda client: str(self._node_of[client]),
            strategy=strategy,
            evaluate=evaluate,
            evaluate_every=1,
        )

    def run(self, rounds: int, least_clients: int, timeout_s: float) -> FederationServer:
        server, never = self.server, threading.Event()
        while server.version < rounds:
            now_s = self._clock.now_s() - self._begin_s
            if now_s > timeout_s:
                raise DeadlineExceeded(
                    f"the federation made {server.version} of {rounds} models in {timeout_s:g} s",
                    where="Flower",
                    why=f"{len(self._node_of)} clients joined, and {least_clients} are needed",
                    fix="See the logs of the SuperLink and the SuperNodes, or allow more time",
                )
            self._look_for_nodes(now_s)
            self._take_answers(now_s)
            if len(self._node_of) >= least_clients:
                self._send(now_s, rounds)
            self._clock.wait(never, _POLL_S)
        return server

    def _look_for_nodes(self, now_s: float) -> None:
        """Note who is connected, and ask new nodes who they are."""
        if now_s - self._looked_s < _NODES_S:
            return
        self._looked_s = now_s
        nodes = list(self._grid.get_node_ids())
        self._is_online[:] = False
        for node in nodes:
            if node in self._number_of:
                self._is_online[self._number_of[node]] = True
        asked = {asked.node for asked in self._asked.values() if asked.version < 0}
        for node in nodes:
            if node not in self._number_of and node not in asked:
                self._push(Message(RecordDict(), dst_node_id=node, message_type=PROFILE), -1, now_s)

    def _push(self, message: Message, version: int, now_s: float) -> None:
        node = message.metadata.dst_node_id
        for number in self._grid.push_messages([message]):
            if number:  # empty where the node is gone
                self._asked[number] = _Asked(node, version, now_s)

    def _take_answers(self, now_s: float) -> None:
        self._asked = {
            id_: asked for id_, asked in self._asked.items() if self._awaits(asked, now_s)
        }
        if not self._asked:
            return
        for reply in self._grid.pull_messages(list(self._asked)):
            asked = self._asked.pop(reply.metadata.reply_to_message_id, None)
            if asked is None:
                continue
            if asked.version < 0:
                self._join(asked.node, reply)
                continue
            client = self._number_of[asked.node]
            if reply.has_error():
                reason = f"the node has failed: {reply.error.reason}"
                self.server.lost(now_s, client, reason, left=reply.error.code in _LEFT)
            elif self.server.waits_for(client, asked.version):
                self._take_update(now_s, client, asked, reply.content)

    def _awaits(self, asked: _Asked, now_s: float) -> bool:
        """Return whether an answer would be of use."""
        if asked.version < 0:
            return now_s - asked.sent_s < _PROFILE_S
        return self.server.waits_for(self._number_of[asked.node], asked.version)

    def _join(self, node: int, reply: Message) -> None:
        """Give a node a number; one that does not answer as ours do is asked again later."""
        if reply.has_error() or node in self._number_of or len(self._node_of) == _MOST_CLIENTS:
            return
        try:
            metrics: Any = reply.content["metrics"]
            samples, free_bytes = (
                int(metrics["samples"]),
                float(metrics.get("free_bytes", math.nan)),
            )
        except _MALFORMED:
            return
        number = self._number_of[node] = len(self._node_of)
        self._node_of.append(node)
        self._samples[number] = max(1, samples)
        self.server.controller.profiler.memory.claim(number, free_bytes)
        self._is_online[number] = True

    def _take_update(self, now_s: float, client: int, asked: _Asked, content: Any) -> None:
        """Take an update; one in another form than ours is as good as none."""
        took_s = max(1e-6, now_s - asked.sent_s)
        try:
            if "refusal" in content:
                said = str(content["refusal"]["memory"])[:_MOST_SAID]
                self.server.lacked_memory(now_s, client, f"too little memory: {said!r}")
                return
            metrics = content["metrics"]
            (delta,) = content["update"].to_numpy_ndarrays()
            samples, steps = int(metrics["samples"]), int(metrics["steps"])
            compute_s = min(max(0.0, float(metrics["compute_s"])), took_s)
            loss, peak_bytes = float(metrics["loss"]), int(metrics.get("peak_bytes", 0))
            accuracy = float(metrics.get("accuracy", math.nan))
        except _MALFORMED as problem:
            reason = f"not in the form of make_client_app: {type(problem).__name__}: {problem}"
            self.server.refuse(now_s, client, "form", reason)
            return
        update = ModelUpdate(
            client=str(asked.node),
            version=asked.version,
            delta=delta,
            samples=samples,
            steps=steps,
            loss=loss,
            accuracy=accuracy,
        )
        timing = Timing(
            samples=samples,
            compute_s=compute_s,
            bytes=2 * self._model_bytes,
            transfer_s=took_s - compute_s,
            peak_bytes=peak_bytes,
        )
        self.server.arrived(now_s, client, update, timing)

    def _send(self, now_s: float, rounds: int) -> None:
        for action in self.server.advance(now_s, self._is_online, rounds):
            if isinstance(action, CancelClient):  # its answer will find nobody who waits for it
                continue
            model = ArrayRecord([self.server.model_of(action.client)])
            content = {"model": model, "config": ConfigRecord({"version": action.version})}
            message = Message(
                RecordDict(content),
                dst_node_id=self._node_of[action.client],
                message_type=TRAIN,
                ttl=max(1.0, action.deadline_s - now_s),
            )
            self._push(message, action.version, now_s)
