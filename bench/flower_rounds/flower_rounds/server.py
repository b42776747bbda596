"""The server: Flower's FedAvg and its own loop, with a clock around each round's training."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from paceline.federated.simulate.classifier import Classifier
from paceline.federated.simulate.images import read_images

app = ServerApp()


class TimedFedAvg(FedAvg):
    """FedAvg that notes when rounds begin and end, and what their slowest client took."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rounds = []

    def configure_train(self, *args, **kwargs):
        self.begin = time.perf_counter()
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        made = super().aggregate_train(server_round, replies)
        wall_s = time.perf_counter() - self.begin
        computed = [reply.content["metrics"]["compute_s"] for reply in replies]
        self.rounds.append({"wall_s": wall_s, "compute_s": sum(computed)})
        return made


@app.main()
def main(grid, context):
    """Train, and write the seconds of each round."""
    config = context.run_config
    inputs = read_images("").images.shape[1]
    strategy = TimedFedAvg(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=config["clients"],
        min_available_nodes=config["clients"],
    )
    model = Classifier(inputs=inputs).initial(np.random.default_rng(0))
    strategy.start(grid, ArrayRecord([model]), num_rounds=config["rounds"], timeout=120)
    Path(config["result"]).write_text(json.dumps(strategy.rounds))
