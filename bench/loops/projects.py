"""Small projects as people have them: projects.py NAME STEPS. For `bench/true_sentences.py`.

Hogwild and the GPT have no process group; the others train under DistributedDataParallel.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WIDTH, BATCH = 256, 32
LOG = logging.getLogger("project")


class Samples(Dataset):
    """Samples that take some time each."""

    def __init__(self, count, sample_s=0.0):
        self.count, self.sample_s = count, sample_s

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.sample_s)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index % 10


def network():
    return nn.Sequential(nn.Linear(WIDTH, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 10))


def train(steps, *, workers=0, sample_s=0.0, after=lambda step, loss: None):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    samples = Samples(steps * BATCH * dist.get_world_size(), sample_s)
    loader = DataLoader(
        samples, BATCH, sampler=DistributedSampler(samples), num_workers=workers, drop_last=True
    )
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        after(step, loss)
    dist.destroy_process_group()


def workers(steps):
    train(steps, workers=2, sample_s=0.0005)


def logs(steps):
    """Writes its log in each step, to the disk."""
    logging.basicConfig(level=logging.INFO, filename=f"log-{os.environ['RANK']}.txt")
    metrics = Path("metrics.jsonl").open("w")  # noqa: SIM115  # for as long as the run

    def after(step, loss):
        LOG.info("step %d: %.4f", step, loss.item())
        if os.environ["RANK"] == "0":
            metrics.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
            metrics.flush()
            os.fsync(metrics.fileno())

    train(4 * steps, after=after)


def uneven(steps):
    """Rank 1 has the longer samples."""
    train(2 * steps, sample_s=0.0002 if os.environ["RANK"] == "1" else 0.0)


def blocks(steps):
    """Rank 1 is slow in half of the steps, for 30 steps on end."""

    def after(step, _):
        if os.environ["RANK"] == "1" and step % 60 < 30:
            time.sleep(0.008)

    train(5 * steps, after=after)


def tiny_gpt(steps):
    """A character model that evaluates now and then and saves what is best."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(65, 64),
            "blocks": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            "head": nn.Linear(64, 65),
        }
    )
    mask = nn.Transformer.generate_square_subsequent_mask(64)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    text = torch.randint(0, 65, (100_000,))

    def loss_of_a_batch():
        starts = torch.randint(0, len(text) - 65, (16,)).tolist()
        x = torch.stack([text[at : at + 64] for at in starts])
        y = torch.stack([text[at + 1 : at + 65] for at in starts])
        hidden = model["blocks"](model["embed"](x), mask=mask, is_causal=True)
        return nn.functional.cross_entropy(model["head"](hidden).flatten(0, 1), y.flatten())

    for step in range(steps):
        if step % 20 == 0:
            model.eval()
            with torch.no_grad():
                losses = [loss_of_a_batch().item() for _ in range(5)]
            model.train()
            print(f"step {step}: {sum(losses) / len(losses):.4f}")
            torch.save(model.state_dict(), "best.pt")
        optimizer.zero_grad(set_to_none=True)
        loss_of_a_batch().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _hogwild_worker(model, steps, seed):
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        x, y = torch.randn(BATCH, WIDTH), torch.randint(0, 10, (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def hogwild(steps):
    """Two processes update one model in shared memory, without locks."""
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 10))
    model.share_memory()
    processes = [
        torch.multiprocessing.get_context("spawn").Process(
            target=_hogwild_worker, args=(model, steps, seed)
        )
        for seed in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    globals()[sys.argv[1]](int(sys.argv[2]))
