"""Trains on images that are so large that decoding them is what limits the loop."""

import sys

import torch
from torch import nn

from paceline.store import Loader, LoaderOptions, RandomCrop

model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
options = LoaderOptions(decode=RandomCrop(8), workers=1, batches_ahead=2)
loader = Loader(sys.argv[1], 2, transform=lambda image: image.float() / 255, options=options)
for images, _ in loader:
    optimizer.zero_grad()
    model(images).square().mean().backward()
    optimizer.step()
stages = loader.stats.stages
print(stages.read_s + stages.verify_s, stages.decode_s, stages.transform_s + stages.collate_s)
