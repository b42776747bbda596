"""Models whose stages are joined by more than one edge, with a batch and a loss for each."""

import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(x + self.second(self.relu(self.first(x))))


class ResidualNet(nn.Module):
    """A skip from the stem to the head, over all stages between."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(4) for _ in range(4)))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        first = self.stem(x)
        return self.head((first + self.blocks(first)).mean((2, 3)))


class UNet(nn.Module):
    """Skips from each level of the way down to the same level of the way up."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        # As many layers as 4 ranks with 2 stages each need.
        self.middle = nn.Sequential(*(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3)))
        self.up2, self.up1 = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        first = torch.tanh(self.down1(x))
        second = torch.tanh(self.down2(functional.max_pool2d(first, 2)))
        deep = torch.tanh(self.middle(functional.max_pool2d(second, 2)))
        up = functional.interpolate(deep, size=second.shape[2:])
        up = torch.tanh(self.up2(torch.cat([up, second], 1)))
        up = functional.interpolate(up, scale_factor=2.0)
        return self.out(torch.tanh(self.up1(torch.cat([up, first], 1))))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mix = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        query, key, value = self.project(self.norm(x)).chunk(3, dim=-1)
        x = x + functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.mix(x)


class Transformer(nn.Module):
    """The first and the last stage use one embedding."""

    def __init__(self, vocabulary=11, width=8):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(6, width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(3))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        _, length = tokens.shape
        x = self.tokens(tokens) + self.places(torch.arange(length))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Many(nn.Module):
    """Several inputs, two of them used late; several outputs; an edge of integers."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 6), nn.Linear(3, 6)
        self.choice = nn.Linear(6, 4)
        self.table = nn.Embedding(4, 6)
        self.unused = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.box, self.kind = nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, left, right, scale=None, *, bias):
        x = torch.tanh(self.left(left))
        chosen = self.choice(x).argmax(-1)
        ignored = self.unused(x)
        y = torch.tanh(self.right(right)) + x
        y = self.middle(y) + self.table(chosen)
        if scale is not None:
            y = y * scale
        return {"box": self.box(y), "kind": (self.kind(y + bias), chosen), "ignored": ignored}


@dataclass
class LibraryOutput:
    """What models of libraries return."""

    logits: torch.Tensor
    states: tuple[torch.Tensor, ...] | None = None


pytree.register_pytree_node(
    LibraryOutput,
    lambda output: ([output.logits, output.states], None),
    lambda values, _: LibraryOutput(*values),
    serialized_type_name="tests.LibraryOutput",
)


class LibraryLayer(nn.Module):
    """Decides by arguments that may be missing, and by the mode."""

    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.dropout = nn.Linear(width, width), dropout

    def forward(self, x, mask=None, **options):
        batch, length, width = x.shape
        query, key, value = self.project(self.norm(x)).view(batch, length, 3, width).unbind(2)
        if options.get("is_causal", True) and mask is None:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + functional.dropout(self.out(mixed), self.dropout, self.training)


class LibraryCore(nn.Module):
    def __init__(self, vocabulary, width, layers, dropout):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.layers = nn.ModuleList(LibraryLayer(width, dropout) for _ in range(layers))

    def forward(self, tokens=None, mask=None, with_states=False, **options):
        if tokens is None:
            raise ValueError("no tokens")
        if tokens.shape[1] > self.places.num_embeddings:
            raise ValueError("too many tokens")
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None, :].bool().expand(-1, tokens.shape[1], -1)
        with torch.no_grad():
            places = torch.arange(tokens.shape[1], device=tokens.device)
        x, states = self.tokens(tokens) + self.places(places), ()
        for layer in self.layers:
            x = layer(x, mask=mask, **options)
            states = (*states, x) if with_states else None
        return x, states


class Library(nn.Module):
    """As models of libraries: one module does all, decides in Python, and its head is tied."""

    def __init__(self, vocabulary=11, width=8, layers=3, dropout=0.0):
        super().__init__()
        self.core = LibraryCore(vocabulary, width, layers, dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.core.tokens.weight

    def forward(self, tokens=None, mask=None, with_states=None, **options):
        x, states = self.core(tokens, mask, with_states, **options)
        return LibraryOutput(self.head(x), states)


class Repeats(nn.Module):
    """The stages use two layers in different orders: a, b, a | b, a."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        for layer in (self.a, self.b, self.a, self.b, self.a):
            x = torch.tanh(layer(x))
        return x


class Masked(nn.Module):
    """Two of its inputs are for all samples: the mask of the places, and their numbers."""

    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.places, self.head = nn.Embedding(8, width), nn.Linear(width, 2)

    def forward(self, mask, x, places):
        x = x + self.places(places)
        for layer in (self.first, self.second):
            query, key, value = layer(x).chunk(3, dim=-1)
            scores = query @ key.transpose(1, 2) + mask
            x = x + torch.softmax(scores, -1) @ value
        return self.head(x).mean(1)


def masked_inputs(samples, length):
    """Return what `Masked` takes."""
    mask = torch.full((length, length), -torch.inf).triu(1)
    return {"mask": mask, "x": torch.randn(samples, length, 4), "places": torch.arange(length)}


class Chooses(Repeats):
    """Its control flow depends on values."""

    def forward(self, x):
        return self.b(self.a(x)) if x.sum() < torch.inf else x


class RandomGraph(nn.Module):
    """Each layer takes values of any earlier layers; some take an input, or change one in place."""

    def __init__(self, seed):
        super().__init__()
        choices = random.Random(seed)
        self.plan = []
        for place in range(choices.randint(4, 10)):
            sources = [n for n in range(place) if choices.random() < 0.3] or [place - 1]
            self.plan.append((sources, choices.random() < 0.2, choices.choice(KINDS)))
        self.tied = choices.random() < 0.3
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in self.plan)
        self.outputs = [n for n in range(len(self.plan)) if choices.random() < 0.2]

    def forward(self, x, late):
        values = []
        for (sources, takes_late, kind), layer in zip(self.plan, self.layers, strict=True):
            y = x if sources == [-1] else sum(values[n] for n in sources)
            if takes_late:
                y = y + late
            y = layer(y)
            if kind == "in place":
                y = y.tanh_()
            elif kind == "pair":
                y = torch.cat(y.chunk(2, -1)[::-1], -1)
            elif kind == "integers":
                y = y * (y.argmax(-1, keepdim=True) + 1)
            elif kind == "sizes":
                y = y.reshape(y.size(0), 5) / y.shape[1]
            values.append(y)
        last = values[-1] @ self.layers[0].weight if self.tied else values[-1]
        return [last, *(values[n] for n in self.outputs)]


KINDS = ("plain", "in place", "pair", "integers", "sizes")


def graph_loss(outputs, target):
    return sum(functional.mse_loss(output, target) for output in outputs)


def library_loss(outputs, target):
    return token_loss(outputs.logits, target)


def many_loss(outputs, target):
    box, (kind, _) = outputs["box"], outputs["kind"]
    return functional.mse_loss(box, target["box"]) + functional.cross_entropy(kind, target["kind"])


def token_loss(outputs, target):
    return functional.cross_entropy(outputs.flatten(0, 1), target.flatten())


def make(name, samples, seed=0):
    """Return a model, a batch as `forward_backward` takes it, its targets, and the loss."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    if name == "transformer":
        model, loss = Transformer(), token_loss
    elif name == "library":
        model, loss = Library(), library_loss
    elif name == "many":
        model, loss = Many(), many_loss
    else:
        model = ResidualNet() if name == "residual" else UNet()
        loss = functional.cross_entropy if name == "residual" else functional.mse_loss
    torch.manual_seed(seed + 1)
    images = torch.randn(samples, 2, 8, 8)
    if name == "residual":
        return model, images, torch.randint(0, 3, (samples,)), loss
    if name == "unet":
        return model, (images,), torch.randn(samples, 1, 8, 8), loss
    if name == "transformer":
        tokens = torch.randint(0, 11, (samples, 6))
        return model, tokens, tokens.roll(-1, 1), loss
    if name == "library":
        tokens = torch.randint(0, 11, (samples, 6))
        mask = (torch.arange(6) < torch.randint(2, 7, (samples, 1))).long()
        return model, {"tokens": tokens, "mask": mask}, tokens.roll(-1, 1), loss
    inputs = {"left": torch.randn(samples, 5), "right": torch.randn(samples, 3)}
    inputs["bias"] = torch.randn(1, 6)
    target = {"box": torch.randn(samples, 2), "kind": torch.randint(0, 3, (samples,))}
    return model, inputs, target, loss


MODELS = ("residual", "unet", "transformer", "many")
