"""A character transformer, trained by `Trainer` on all ranks, with a state to go on from.

    python examples/train_text.py
    paceline run -n 2 examples/train_text.py --engine sharded --precision bfloat16
    paceline run -n 2 examples/train_text.py --resume text.pt

--text FILE is what it learns; without it, the source of Python's own standard library. Each rank
trains on windows of its own (weak scaling): the learning rate grows with the number of ranks. After
each epoch rank 0 writes text.pt; --resume goes on from it, on any number of ranks and with any
engine but fsdp2. The last line of output is one JSON object.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from paceline.training import Trainer
from paceline.training.optimizers import LAMB, parameter_groups

WINDOW, WIDTH, LAYERS, STATE = 64, 128, 3, Path("text.pt")


class Windows(Dataset):
    """Windows of a text, each with itself one character further."""

    def __init__(self, text, window):
        self.bytes = torch.tensor(list(text), dtype=torch.long)
        self.window = window

    def __len__(self):
        return (len(self.bytes) - 1) // self.window

    def __getitem__(self, index):
        begin = index * self.window
        piece = self.bytes[begin : begin + self.window + 1]
        return piece[:-1], piece[1:]


class Transformer(nn.Module):
    """Predicts each next byte from those before it; the embedding is the output's matrix too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(WINDOW, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, 256, bias=False)
        self.output.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, given):
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        hidden = self.layers(self.embedding(given) + self.place, mask=mask, is_causal=True)
        return self.output(self.norm(hidden))


def loss_fn(scores, wanted):
    return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def read_text(path):
    if path is not None:
        return path.read_bytes()
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    return b"".join(source.read_bytes() for source in sources)[:400_000]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="file to learn")
    parser.add_argument("--epochs", type=int, default=2, help="in all, with those of --resume")
    parser.add_argument("--batch", type=int, default=32, help="windows per rank and step")
    parser.add_argument("--engine", help="of prepare: allreduce, sharded, root, ddp or fsdp2")
    parser.add_argument("--precision", default="float32", help="float32, bfloat16 or float16")
    parser.add_argument("--resume", type=Path, help="state that an earlier run has written")
    options = parser.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group()
    torch.manual_seed(0)
    windows = Windows(read_text(options.text), WINDOW)
    sampler = DistributedSampler(windows) if dist.is_initialized() else RandomSampler(windows)
    loader = DataLoader(windows, batch_size=options.batch, sampler=sampler)
    model = Transformer()
    optimizer = LAMB(parameter_groups(model, weight_decay=0.01), lr=0.01)
    trainer = Trainer(
        model,
        optimizer,
        loss_fn,
        engine=options.engine,
        precision=options.precision,
        scaling="weak",
        clip_norm=1.0,
    )
    if options.resume is not None:
        trainer.load_state_dict(torch.load(options.resume))
    epoch = None
    for epoch in trainer.fit(loader, epochs=options.epochs):
        state = trainer.state_dict()  # all ranks take part
        if trainer.prepared.ranks.rank == 0:
            torch.save(state, STATE)
            print(epoch, flush=True)
    if trainer.prepared.ranks.rank == 0:
        loss = epoch.loss if epoch else None
        print(json.dumps({"ranks": trainer.prepared.ranks.size, "loss": loss}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
