"""Trains on a data set that reads a file for each sample; arguments: workers, how they start."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    """Forty samples, each read from this file."""

    def __len__(self):
        return 40

    def __getitem__(self, number):
        size = len(Path(__file__).read_bytes()) % 7
        return torch.full((16,), float(number + size)), number


def main():
    """Train for two epochs, and print what came of it."""
    workers, start = int(sys.argv[1]), sys.argv[2]
    context = {"multiprocessing_context": start} if workers else {}
    loader = DataLoader(Files(), 8, num_workers=workers, **context)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    seen = []
    for _ in range(2):
        for inputs, numbers in loader:
            seen += numbers.tolist()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    print(sum(seen), len(seen), model.weight.sum().item())


if __name__ == "__main__":
    main()
