"""Models of `predict_unseen.py`: each function returns what a training step needs.

No rate, interval or formula of Paceline's was fitted to them. Those that a prediction was developed
with are in `predict_small.py`.
"""

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import nn
from torch.utils.checkpoint import checkpoint


def _adam(**settings):
    return lambda parameters: torch.optim.Adam(parameters, lr=1e-3, **settings)


def _adamw(**settings):
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **settings)


def _sgd(**settings):
    return lambda parameters: torch.optim.SGD(parameters, lr=0.01, **settings)


def _classes(batch, count=10):
    return torch.randint(0, count, (batch,))


class Recurrent(nn.Module):
    def __init__(self, kind, inputs, width, layers):
        super().__init__()
        self.cells = kind(inputs, width, layers, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


def lstm():
    model = Recurrent(nn.LSTM, 40, 160, 2)
    return model, torch.randn(24, 60, 40), _classes(24), F.cross_entropy, _adam()


def gru():
    model = Recurrent(nn.GRU, 32, 96, 1)
    return model, torch.randn(16, 30, 32), _classes(16), F.cross_entropy, _sgd()


def _separable(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU6(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


def depthwise():
    blocks = [nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU6()]
    for inputs, outputs, stride in ((24, 48, 1), (48, 96, 2), (96, 96, 1), (96, 192, 2)):
        blocks.append(_separable(inputs, outputs, stride))
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 10))
    return model, torch.randn(16, 3, 56, 56), _classes(16), F.cross_entropy, _sgd(momentum=0.9)


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down1, self.down2 = self._double(1, width), self._double(width, 2 * width)
        self.middle = self._double(2 * width, 4 * width)
        self.up2, self.up1 = self._double(6 * width, 2 * width), self._double(3 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _double(inputs, outputs):
        return nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()),
            *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()),
        )

    def forward(self, x):
        high = self.down1(x)
        low = self.down2(F.max_pool2d(high, 2))
        x = self.middle(F.max_pool2d(low, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2, mode="bilinear"), low], 1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2, mode="bilinear"), high], 1))
        return self.head(x)


def unet():
    target = torch.randint(0, 2, (4, 64, 64))
    return UNet(12), torch.randn(4, 1, 64, 64), target, F.cross_entropy, _adam()


class Block(nn.Module):
    """A transformer's layer, before which its input is normalised."""

    def __init__(self, width, heads, *, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (
            part.view(b, t, self.heads, w // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, width, depth, size=48, patch=8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, 4, causal=False) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.blocks(x).mean(1))


def vit():
    model = ViT(128, 5)
    return model, torch.randn(12, 3, 48, 48), _classes(12), F.cross_entropy, _adamw()


def vit_batch_1():
    return ViT(96, 6), torch.randn(1, 3, 48, 48), _classes(1), F.cross_entropy, _sgd()


class GPT(nn.Module):
    """Takes and returns dicts, as models of transformers do; its embeddings are tied."""

    def __init__(self, width, depth, *, length=96, vocabulary=1200, dtype=None, saves=False):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4, causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.dtype, self.saves = dtype, saves

    def forward(self, input_ids, labels):
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            x = self.token(input_ids) + self.place.weight[: input_ids.shape[1]]
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
            logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def _gpt(optimizer, **settings):
    tokens = torch.randint(0, 1200, (6, 97))
    inputs = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    return {"module": GPT(144, 4, **settings), "inputs": inputs, "optimizer": optimizer}


def gpt():
    return _gpt(_adamw())


def gpt_bf16():
    return _gpt(_adamw(), dtype=torch.bfloat16)


def gpt_checkpointing():
    return _gpt(_sgd(), saves=True)


class DLRM(nn.Module):
    """Embedding bags and dense features, of which all pairs are multiplied."""

    def __init__(self, tables, rows, width, *, sparse):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse) for _ in range(tables)
        )
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 128), nn.ReLU(), nn.Linear(128, 1))
        left, right = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("left", left)
        self.register_buffer("right", right)

    def forward(self, dense, indices):
        dense = self.bottom(dense)
        rows = [table(indices[i]) for i, table in enumerate(self.tables)]
        features = torch.stack([dense, *rows], 1)
        products = features @ features.transpose(1, 2)
        return self.top(torch.cat([dense, products[:, self.left, self.right]], 1)).squeeze(1)


def _dlrm(sparse):
    inputs = (torch.randn(256, 13), torch.randint(0, 20000, (8, 256, 4)))
    model = DLRM(8, 20000, 16, sparse=sparse)
    loss = F.binary_cross_entropy_with_logits
    return model, inputs, torch.rand(256).round(), loss, _sgd()


def dlrm():
    return _dlrm(sparse=False)


def dlrm_sparse():
    return _dlrm(sparse=True)


def conv1d():
    layers = []
    for width, dilation in ((1, 1), (32, 2), (32, 4), (32, 8)):
        layers += [nn.Conv1d(width, 32, 3, padding=dilation, dilation=dilation), nn.Tanh()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 10))
    return model, torch.randn(16, 1, 2048), _classes(16), F.cross_entropy, _adam()


def transposed():
    model = nn.Sequential(
        *(nn.Conv2d(3, 24, 4, 2, 1), nn.BatchNorm2d(24), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(24, 48, 4, 2, 1), nn.BatchNorm2d(48), nn.LeakyReLU(0.2)),
        *(nn.ConvTranspose2d(48, 24, 4, 2, 1), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.ConvTranspose2d(24, 3, 4, 2, 1), nn.Sigmoid()),
    )
    x = torch.rand(16, 3, 48, 48)
    return model, x, x.clone(), F.mse_loss, _adam(betas=(0.5, 0.999))


class MixerLayer(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 96), nn.GELU(), nn.Linear(96, tokens))
        self.widths = nn.Sequential(nn.Linear(width, 320), nn.GELU(), nn.Linear(320, width))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.widths(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.layers = nn.Sequential(*(MixerLayer(49, width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


def mixer():
    return Mixer(112, 4), torch.randn(12, 3, 56, 56), _classes(12), F.cross_entropy, _adamw()


def _wide(optimizer):
    layers = [nn.Linear(600, 900), nn.ELU(), nn.Dropout(0.1), nn.Linear(900, 900), nn.ELU()]
    model = nn.Sequential(*layers, nn.Linear(900, 10))
    return model, torch.randn(48, 600), _classes(48), F.cross_entropy, optimizer


def mlp_fused():
    return _wide(_adamw(fused=True))


def mlp_foreach():
    return _wide(_adam(foreach=True))


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x):
        kept = self.skip(x)
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + kept)


def resnet_accumulation():
    layers = [nn.Conv2d(3, 20, 3, 1, 1), Residual(20, 40, 2), Residual(40, 80, 2)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(80, 10))
    return {
        "module": model,
        "inputs": torch.randn(8, 3, 40, 40),
        "target": _classes(8),
        "loss_fn": F.cross_entropy,
        "optimizer": _sgd(momentum=0.9, nesterov=True),
        "accumulation": 4,
    }


class Translator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.source, self.target = nn.Embedding(500, width), nn.Embedding(500, width)
        self.layers = nn.Transformer(
            width, 4, 2, 2, 3 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 500)

    def forward(self, source, target):
        return self.head(self.layers(self.source(source), self.target(target))).flatten(0, 1)


def translator():
    source, target = torch.randint(0, 500, (8, 40)), torch.randint(0, 500, (8, 36))
    loss = F.cross_entropy
    return Translator(112), (source, target), target.flatten(), loss, _adam(foreach=False)
