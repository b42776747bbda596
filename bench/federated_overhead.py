"""What a round costs beyond the clients' work: the embedded engine, and Flower's simulation.

Both train the same small classifier on the digits of scikit-learn, 10 steps of 20 on each of 4
clients in each round. Of Flower it is the FedAvg that it ships, in its own loop, on the actors of
its simulation (bench/flower_rounds); its first rounds, which start the actors, do not count.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from paceline.federated.config import DataOptions, FederationConfig
from paceline.federated.simulate.classifier import Classifier
from paceline.federated.simulate.engine import ClientWork, FederationSimulation
from paceline.federated.simulate.world import DeviceOptions
from paceline.federated.study import read_data, simulate

ROOT = Path(__file__).parents[1]
CLIENTS, ROUNDS, STARTING = 4, 30, 3
DEADLINE_S = 240


def embedded():
    """Return the seconds of the engine per round, without training and evaluating."""
    work = ClientWork(batch=20, epochs=1.0, learning_rate=0.05)
    config = FederationConfig(
        clients=CLIENTS,
        cohort=CLIENTS,
        rounds=400,
        strategy="random",
        work=work,
        data=DataOptions(alpha=1000.0, most_samples=200),
        devices=DeviceOptions(online=False, drop_share=0.0),
    )
    data, scores = read_data(config)
    spent = []
    with timed(Classifier, "train", spent), timed(FederationSimulation, "_evaluate", spent):
        begin = time.perf_counter()
        result = simulate(config, data, scores, "random", 0)
        wall_s = time.perf_counter() - begin
    return (wall_s - sum(spent)) / result.rounds


@contextmanager
def timed(owner, name, spent):
    """Add the seconds of a method's calls to a list."""
    method = getattr(owner, name)

    def measured(*args, **kwargs):
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - begin)

    setattr(owner, name, measured)
    try:
        yield
    finally:
        setattr(owner, name, method)


def flower_programs():
    """Return the folder of Flower's programs; None: it is not here, or without its simulation."""
    folder = Path(os.environ.get("FLOWER_BIN", ROOT / "build/flower/bin"))
    if (folder / "flwr").exists() and (folder / "ray").exists():
        return folder
    return None


def flower(programs):
    """Return the seconds of each round of Flower's simulation beyond its clients' computing.

    All that the clients computed is taken off, as if they had computed one after the other: what
    is left is less than the overhead of a round in which they overlap.
    """
    with tempfile.TemporaryDirectory() as scratch, flower_home(programs, scratch) as run:
        result = Path(scratch) / "result.json"
        run(
            "federation", "simulation-config", "@none/default", "local", "--num-supernodes", CLIENTS
        )
        config = f"rounds={ROUNDS} clients={CLIENTS} result='{result}'"
        app = ROOT / "bench/flower_rounds"
        said = run("run", app, "local", "--stream", "--run-config", config)
        if not result.exists():
            raise RuntimeError(f"Flower's simulation has failed:\n{said[-3000:]}")
        rounds = json.loads(result.read_text())[STARTING:]
    return [max(0.0, found["wall_s"] - found["compute_s"]) for found in rounds]


@contextmanager
def flower_home(programs, scratch):
    """Yield what runs `flwr` in a folder of its own; end what it leaves running in the end."""
    home = Path(scratch) / "home"
    home.mkdir()
    environ = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OPENBLAS_NUM_THREADS": "1",
    }

    def run(*words):
        done = subprocess.run(
            [programs / "flwr", *map(str, words)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            cwd=scratch,
        )
        return done.stdout + done.stderr

    try:
        yield run
    finally:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"FLWR_HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:  # it has ended, or is not ours
                continue
