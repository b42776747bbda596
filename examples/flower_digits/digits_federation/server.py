"""The server: begins with random parameters, tests each new model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from flwr.serverapp import ServerApp

from paceline.federated.flower import serve
from paceline.federated.monitor import evaluate
from paceline.federated.simulate.classifier import Classifier
from paceline.federated.simulate.images import read_images
from paceline.federated.strategies import make_strategy

app = ServerApp()


@app.main()
def main(grid, context):
    """Train, and write what came of it."""
    config = context.run_config
    data = read_images(config["folder"])
    classifier = Classifier(inputs=data.images.shape[1])

    def test(now_s, version, parameters):
        predicted = classifier.probabilities(parameters, data.test_images).argmax(1)
        found = evaluate(now_s, version, predicted, data.test_labels)
        print(f"model {version} after {now_s:.1f} s: accuracy {found.accuracy:.1%}", flush=True)
        return found

    server = serve(
        grid,
        make_strategy(config["strategy"], config["cohort"]),
        classifier.initial(np.random.default_rng(0)),
        test,
        rounds=config["rounds"],
        least_clients=config["clients"],
        timeout_s=config["timeout-s"],
    )
    if config["result"]:
        result = {
            "accuracy": [found.accuracy for found in server.monitor.evaluations],
            "returned": server.controller.returned[server.controller.returned > 0].tolist(),
            "refused": [refusal.reason for refusal in server.refused],
            "memory_bytes": server.controller.profiler.memory.needed_bytes,
        }
        Path(config["result"]).write_text(json.dumps(result))
