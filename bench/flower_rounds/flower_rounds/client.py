"""A client: trains on its part of the digits, and says how long that took."""

from __future__ import annotations

import time

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from paceline.federated.simulate.classifier import Classifier
from paceline.federated.simulate.images import read_images

BATCH, STEPS, LEARNING_RATE = 20, 10, 0.05

app = ClientApp()
DATA = []  # of this process, which serves many messages


@app.train()
def train(message, context):
    """Do the steps of a round."""
    if not DATA:
        DATA.append(read_images(""))
    part, parts = (context.node_config[name] for name in ("partition-id", "num-partitions"))
    images, labels = DATA[0].images[part::parts], DATA[0].labels[part::parts]
    begin = time.perf_counter()
    (before,) = message.content["arrays"].to_numpy_ndarrays()
    after, _ = Classifier(inputs=images.shape[1]).train(
        before,
        images,
        labels,
        batch=BATCH,
        steps=STEPS,
        learning_rate=LEARNING_RATE,
        rng=np.random.default_rng(),
    )
    metrics = {"num-examples": len(labels), "compute_s": time.perf_counter() - begin}
    content = {"arrays": ArrayRecord([after]), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)
