"""A CNN on scikit-learn's handwritten digits, in large batches on all ranks of the job.

    python examples/train_images.py                         one process
    paceline run -n 2 examples/train_images.py              two ranks of this host
    torchrun --nproc-per-node 2 examples/train_images.py    the same, without Paceline's launcher

The batch of a step is --batch images, whatever the number of ranks: each rank takes its part of it
(strong scaling). LARS keeps the accuracy of a small batch; --optimizer sgd shows what is lost
without. `prepare` is all that the ranks need. The last line of output is one JSON object.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.training import prepare
from paceline.training.optimizers import (
    LARS,
    LargeBatchRate,
    large_batch_schedule,
    parameter_groups,
)

TUNED_BATCH = 64  # for which the rates below were chosen


def load_tensors():
    """Return (train, test) data sets; every fifth image is for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def build_model():
    def block(inputs, outputs):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

    return nn.Sequential(block(1, 32), block(32, 64), nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=512, help="images in a step, of all ranks")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--optimizer", choices=("lars", "sgd"), default="lars")
    parser.add_argument("--engine", help="of prepare: allreduce, sharded, root, ddp or fsdp2")
    parser.add_argument("--precision", default="float32", help="float32, bfloat16 or float16")
    options = parser.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group()
    torch.manual_seed(0)
    train, test = load_tensors()
    # All ranks draw the same batches, of which `prepared.batches` gives each its part.
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(
        train, batch_size=options.batch, shuffle=True, drop_last=True, generator=order
    )
    model = build_model()
    groups = parameter_groups(model, weight_decay=5e-4)
    if options.optimizer == "lars":
        optimizer, rule = LARS(groups, lr=4.0), "square-root"
    else:
        optimizer, rule = torch.optim.SGD(groups, lr=0.05, momentum=0.9), "linear"
    prepared = prepare(
        model, optimizer, engine=options.engine, precision=options.precision, scaling="strong"
    )
    model, optimizer = prepared
    rate = LargeBatchRate(
        batch=options.batch,
        reference_batch=TUNED_BATCH,
        epochs=options.epochs,
        steps_per_epoch=len(loader),
        rule=rule,
    )
    schedule = large_batch_schedule(optimizer, rate)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(options.epochs):
        model.train()
        for images, labels in prepared.batches(loader):
            optimizer.zero_grad()
            loss = loss_fn(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
        if prepared.ranks.rank == 0 and epoch % 5 == 4:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

    model.eval()
    images, labels = test.tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    if prepared.ranks.rank == 0:
        steps = prepared.before_step.step
        print(json.dumps({"ranks": prepared.ranks.size, "steps": steps, "accuracy": accuracy}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
