"""Trains on a folder of images, a class a sub-folder, as any PyTorch script does.

It knows nothing of Paceline. Prints the loss of each epoch and a checksum of the weights on rank 0.
"""

import json
import os
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class ImageFolder(Dataset):
    def __init__(self, root):
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted(Path(root, name).glob("*.png"))
        ]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        pixels = np.asarray(Image.open(path).convert("L"), np.float32) / 255
        return torch.from_numpy(pixels.copy()).flatten(), label


def main(root, workers):
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = ImageFolder(root)
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, 8, sampler=sampler, num_workers=workers)
    model = DistributedDataParallel(torch.nn.Linear(len(data[0][0]), 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for pixels, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    if dist.get_rank() == 0:
        said = {"images": len(data), "losses": losses, "weights": zlib.crc32(weights)}
        sys.stdout.write(json.dumps(said) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
