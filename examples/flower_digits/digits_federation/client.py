"""A node: trains on its part of the images."""

from __future__ import annotations

import numpy as np

from paceline.federated.flower import LocalWork, make_client_app
from paceline.federated.simulate.classifier import Classifier
from paceline.federated.simulate.images import read_images

BATCH, LEARNING_RATE = 20, 0.05


def own_part(context):
    """Return the node's images and labels: partition-id and num-partitions say which."""
    data = read_images(context.run_config["folder"])
    part, parts = (context.node_config[name] for name in ("partition-id", "num-partitions"))
    return data.images[part::parts], data.labels[part::parts]


def samples(context):
    """Return how many images the node has."""
    return len(own_part(context)[1])


def train(parameters, context):
    """Train for one epoch."""
    images, labels = own_part(context)
    steps = max(1, len(labels) // BATCH)
    classifier = Classifier(inputs=images.shape[1])
    predicted = classifier.probabilities(parameters, images).argmax(1)
    after, loss = classifier.train(
        parameters,
        images,
        labels,
        batch=BATCH,
        steps=steps,
        learning_rate=LEARNING_RATE,
        rng=np.random.default_rng(),
    )
    return LocalWork(after, len(labels), steps, loss, accuracy=float((predicted == labels).mean()))


app = make_client_app(samples, train)
