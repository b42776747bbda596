"""A convolutional network on JPEG images in a folder by class, as torchvision's ImageFolder."""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from training import train


class ImageFolder(torch.utils.data.Dataset):
    def __init__(self, root):
        classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.items = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted((root / name).iterdir())
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        path, label = self.items[number]
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB").resize((64, 64)), np.float32)
        return torch.from_numpy(pixels).permute(2, 0, 1) / 255, label


def block(inputs, outputs):
    return [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


model = nn.Sequential(
    *block(3, 32),
    *block(32, 64),
    *block(64, 128),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(128, 10),
)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def step(batch):
    images, labels = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


train(ImageFolder(Path(sys.argv[1])), step, batch=32, epochs=int(sys.argv[2]))
