"""The models that bench/out_of_core.py trains."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

TOKENS, WORDS, SEQUENCE, HEAD = 2048, 1000, 256, 64


class Transformer(nn.Module):
    def __init__(self, is_checkpointed, width=512, layers=8):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // HEAD, 4 * width, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, WORDS)
        self.is_checkpointed = is_checkpointed

    def forward(self, words):
        x = self.embedding(words)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.head(x).transpose(1, 2)


class Cnn(nn.Module):
    def __init__(self, is_checkpointed, channels=64, blocks=10):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(channels, 10)
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            y = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            x = torch.relu(x + y)
        return self.head(x.mean(dim=(2, 3)))


def make(name, is_checkpointed, is_quick):
    """Return a model, its inputs and targets; of the quick size three models fit into a minute."""
    torch.manual_seed(0)
    if name == "transformer":
        shape = (TOKENS // SEQUENCE, SEQUENCE)
        words = torch.randint(WORDS, (2, *shape))
        size = {"width": 256, "layers": 5} if is_quick else {}
        return Transformer(is_checkpointed, **size), words[0], words[1]
    count = 6 if is_quick else 16
    model = Cnn(is_checkpointed)
    return model, torch.randn(count, 3, 96, 96), torch.randint(10, (count,))
