"""The models of pipeline.py: residual nets as HyPar-Flow trained, and a chain of equal layers.

ResNet-110 is He et al., Deep Residual Learning (2016), section 4.2; ResNet-1001 has the
pre-activation bottlenecks of He et al., Identity Mappings (2016). Both take 32 x 32 images. AlexNet
is that of Krizhevsky, One weird trick (2014): 61 M parameters, 59 M of them in three linear layers.
"""

from __future__ import annotations

from torch import nn


class Basic(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.last = nn.ReLU()

    def forward(self, x):
        return self.last(self.body(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    """Pre-activation, 1 x 1, 3 x 3 and 1 x 1 convolutions, and a shortcut."""

    expansion = 4

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = width * self.expansion
        self.first = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = self.first(x)
        return self.body(y) + self.shortcut(y if isinstance(self.shortcut, nn.Conv2d) else x)


def resnet(depth, *, width=16, classes=10):
    """Return a residual net for 32 x 32 images: 6n + 2 layers of basic blocks up to 110 and at
    5,000 (4,998 of them in blocks), 9n + 2 of bottlenecks at 1001.
    """
    is_bottleneck = depth == 1001
    blocks = (depth - 2) // (9 if is_bottleneck else 6)
    layers = [nn.Conv2d(3, width, 3, 1, 1, bias=False)]
    inputs = width
    for group in range(3):
        for index in range(blocks):
            stride = 2 if group and not index else 1
            outputs = width << group
            if is_bottleneck:
                layers.append(Bottleneck(inputs, outputs, stride))
                inputs = outputs * Bottleneck.expansion
            else:
                layers.append(Basic(inputs, outputs, stride))
                inputs = outputs
    if is_bottleneck:
        layers += [nn.BatchNorm2d(inputs), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers)


def chain(layers, width):
    """Return equal layers, one after the other, which any pipeline accepts."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks)


class Block(nn.Module):
    """A pre-norm layer of a transformer: causal attention, then two linear layers with GELU."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def transformer(layers, width, *, words=256, heads=6):
    """Return a language model without positions; it gives (batch, words, length), for the loss."""
    blocks = [Block(width, heads) for _ in range(layers)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, words))
    return nn.Sequential(nn.Embedding(words, width), *blocks, head, Transposed())


class Transposed(nn.Module):
    """Classes before positions, as torch's cross-entropy takes them."""

    def forward(self, x):
        return x.transpose(1, 2)


def alexnet(classes=1000):
    """Return AlexNet for 224 x 224 images."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        nn.Flatten(),
        *(nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), nn.ReLU()),
        *(nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, classes)),
    )
