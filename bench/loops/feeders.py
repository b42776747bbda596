"""Read one epoch by each feeder: `feeders.py FRAMEWORK PACK`, under a launcher.

Each rank writes what its loops received, by cell, to `feeders-RANK.json` in `$LOOP_OUT`. A cell is
a feeder and its workers; a sample is its own number.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from paceline.core.errors import PacelineError
from paceline.store import Loader, LoaderOptions, PackDataset, PackSampler

GLOBAL_BATCH = 12  # shared by 1, 2 and 3 ranks
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
warnings.simplefilter("ignore")


def number(body):
    return int(bytes(body))


def sampled(pack, workers):
    sampler = PackSampler(pack, GLOBAL_BATCH)
    return DataLoader(PackDataset(pack, number), batch_sampler=sampler, num_workers=workers)


def plain(pack, workers):
    """A data set whose samples the framework shares out."""
    dataset = PackDataset(pack, number)
    return DataLoader(dataset, GLOBAL_BATCH // RANKS, shuffle=True, num_workers=workers)


def loader(pack, workers):
    kind = {"worker_kind": "process", "workers": workers} if workers else {"workers": 1}
    return Loader(pack, GLOBAL_BATCH, transform=number, options=LoaderOptions(**kind))


FEEDERS = {"Loader": loader, "PackDataset": plain, "PackSampler": sampled}


def numbers(batches):
    return [sample for samples, _ in batches for sample in samples.tolist()]


def with_torch(pack, feeder, workers):
    if feeder != "PackDataset":
        return numbers(FEEDERS[feeder](pack, workers))
    dataset = PackDataset(pack, number)
    sampler = DistributedSampler(dataset)
    share = GLOBAL_BATCH // RANKS
    return numbers(DataLoader(dataset, share, sampler=sampler, num_workers=workers))


def with_accelerate(pack, feeder, workers):
    from accelerate import Accelerator

    return numbers(Accelerator(cpu=True).prepare(FEEDERS[feeder](pack, workers)))


class Net(nn.Module):
    """A model that notes what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = []

    def forward(self, samples):
        self.seen += samples.tolist()
        return {"loss": (self.weight * samples).mean()}


def with_lightning(pack, feeder, workers):
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def train_dataloader(self):
            return FEEDERS[feeder](pack, workers)

        def training_step(self, batch, _):
            return self.net(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.environ["LOOP_OUT"],
    )
    trainer.fit(module)
    return module.net.seen


def with_trainer(pack, feeder, workers):
    from transformers import Trainer, TrainingArguments

    class Fed(Trainer):
        def get_train_dataloader(self):
            batches = FEEDERS[feeder](pack, workers)
            return self.accelerator.prepare(batches) if feeder == "PackDataset" else batches

        def compute_loss(self, model, inputs, *_, **__):
            return model(inputs[0])["loss"]

    arguments = TrainingArguments(
        os.environ["LOOP_OUT"],
        num_train_epochs=1,
        per_device_train_batch_size=GLOBAL_BATCH // RANKS,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    net = Net()
    Fed(model=net, args=arguments, train_dataset=PackDataset(pack, number)).train()
    return net.seen


def main():
    framework, pack = sys.argv[1:3]
    torch.set_num_threads(1)
    if framework == "torch":
        dist.init_process_group("gloo")
    cells = {}
    for feeder in FEEDERS:
        for workers in (0, 2):
            try:
                seen = globals()[f"with_{framework}"](pack, feeder, workers)
            except PacelineError as error:
                seen = f"refused: {error}"
            except Exception as error:  # whatever a framework raises: the cell has failed by it
                seen = f"{type(error).__name__}: {error}"
            cells[f"{feeder}, {workers} workers"] = seen
    out = Path(os.environ["LOOP_OUT"]) / f"feeders-{RANK}.json"
    out.write_text(json.dumps(cells))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
