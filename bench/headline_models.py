"""The models of the published results in headlines.py, for `paceline plan FILE.py:FUNCTION` too.

Written from the papers: He et al. 2016 (ResNet), He et al. 2016b (pre-activation, ResNet-1001),
Szegedy et al. 2015 (GoogLeNet without its auxiliary heads), Krizhevsky's network for CIFAR-10.
"""

import torch
from torch import nn

CLASSES, PIXELS = 1000, 224


def step(module, pixels, classes, dtype=torch.float32, samples=2):
    """Return what `paceline plan` captures; the batch is resized to what is asked for."""
    images = torch.empty(samples, 3, pixels, pixels, dtype=dtype)
    target = torch.zeros(samples, dtype=torch.int64)
    return {
        "module": module.to(dtype),
        "inputs": images,
        "target": target,
        "loss_fn": nn.functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }


def conv(inputs, outputs, kernel, stride=1):
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 convolutions beside a shortcut."""

    def __init__(self, inputs, width, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            conv(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(),
            conv(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(),
            conv(width, outputs, 1), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = stride == 1 and inputs == outputs
        project = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if same else project
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.body(x) + self.shortcut(x))


class PreActivated(nn.Module):
    """The same with normalisation before each convolution."""

    def __init__(self, inputs, width, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), conv(inputs, width, 1),
            nn.BatchNorm2d(width), nn.ReLU(), conv(width, width, 3, stride),
            nn.BatchNorm2d(width), nn.ReLU(), conv(width, outputs, 1),
        )  # fmt: skip
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv(inputs, outputs, 1, stride)

    def forward(self, x):
        return self.body(x) + self.shortcut(x)


def stages(block, inputs, widths, counts, first_stride):
    blocks = []
    for number, (width, count) in enumerate(zip(widths, counts, strict=True)):
        for index in range(count):
            stride = (2 if number else first_stride) if index == 0 else 1
            blocks.append(block(inputs, width, 4 * width, stride))
            inputs = 4 * width
    return blocks


def head(channels, classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def imagenet_resnet(counts):
    stem = [conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    blocks = stages(Bottleneck, 64, (64, 128, 256, 512), counts, first_stride=1)
    return nn.Sequential(*stem, *blocks, head(2048, CLASSES))


def cifar_resnet(blocks_per_stage):
    blocks = stages(PreActivated, 16, (16, 32, 64), (blocks_per_stage,) * 3, first_stride=1)
    last = [nn.BatchNorm2d(256), nn.ReLU()]
    return nn.Sequential(conv(3, 16, 3), *blocks, *last, head(256, 10))


class Inception(nn.Module):
    """Four branches, joined along the channels."""

    def __init__(self, inputs, one, three_reduce, three, five_reduce, five, pool):
        super().__init__()

        def unit(i, o, kernel):
            return [nn.Conv2d(i, o, kernel, padding=kernel // 2), nn.ReLU()]

        self.branches = nn.ModuleList([
            nn.Sequential(*unit(inputs, one, 1)),
            nn.Sequential(*unit(inputs, three_reduce, 1), *unit(three_reduce, three, 3)),
            nn.Sequential(*unit(inputs, five_reduce, 1), *unit(five_reduce, five, 5)),
            nn.Sequential(nn.MaxPool2d(3, 1, padding=1), *unit(inputs, pool, 1)),
        ])  # fmt: skip

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def googlenet_module():
    def pool():
        return nn.MaxPool2d(3, 2, ceil_mode=True)

    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, padding=3), nn.ReLU(), pool(), nn.LocalResponseNorm(5),
        nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 192, 3, padding=1), nn.ReLU(),
        nn.LocalResponseNorm(5), pool(),
        Inception(192, 64, 96, 128, 16, 32, 32), Inception(256, 128, 128, 192, 32, 96, 64), pool(),
        Inception(480, 192, 96, 208, 16, 48, 64), Inception(512, 160, 112, 224, 24, 64, 64),
        Inception(512, 128, 128, 256, 24, 64, 64), Inception(512, 112, 144, 288, 32, 64, 64),
        Inception(528, 256, 160, 320, 32, 128, 128), pool(),
        Inception(832, 256, 160, 320, 32, 128, 128), Inception(832, 384, 192, 384, 48, 128, 128),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(1024, CLASSES),
    )  # fmt: skip


def resnet50():
    return step(imagenet_resnet((3, 4, 6, 3)), PIXELS, CLASSES)


def resnet50_half():
    """The same in 16 bits, whose gradients take half as many bytes."""
    return step(imagenet_resnet((3, 4, 6, 3)), PIXELS, CLASSES, torch.bfloat16)


def googlenet():
    return step(googlenet_module(), PIXELS, CLASSES)


def resnet110():
    return step(cifar_resnet(12), 32, 10)


def resnet1001():
    return step(cifar_resnet(111), 32, 10)


def cifar10():
    """Krizhevsky's three convolutions, which Caffe trains on CIFAR-10."""
    layers = []
    for inputs, outputs in ((3, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    return step(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 9, 10)), 32, 10)
