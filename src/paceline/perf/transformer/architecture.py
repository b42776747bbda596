"""The architecture of a transformer: the numbers from which its costs follow, without weights.

A user gives them as flags, as JSON, or as the ``config.json`` of a published model
(`configurations`). `layer` turns an Architecture into FLOPs, bytes and saved activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture(Record):
    """A transformer: equal layers between an embedding and an output layer.

    Attributes:
        name: of the model.
        layers: number of equal blocks.
        hidden: width of the residual stream.
        heads: of attention.
        kv_heads: heads of keys and values; 0: as many as `heads`.
        ffn: inner width of the feed-forward block; 0: 4 times `hidden`.
        vocab: tokens that the embedding knows; of an image model, classes of the output layer.
        sequence: tokens of a sample.
        gated: the feed-forward block multiplies two projections (SwiGLU).
        tied: embedding and output layer share their weights.
        causal: a token attends only to those before it.
        positions: learned positions of the embedding; 0: none.
        rotary: queries and keys are rotated by their positions.
        biases: linear layers and norms have biases.
        dropout: activations are dropped at random.
        patch_inputs: values of an image patch that is projected to a token; 0: tokens have numbers.
    """

    name: str = "transformer"
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    ffn: int = 0
    vocab: int
    sequence: int
    gated: bool = False
    tied: bool = True
    causal: bool = True
    positions: int = 0
    rotary: bool = False
    biases: bool = True
    dropout: bool = False
    patch_inputs: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "sequence"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"'{name}' must be at least 1, got {getattr(self, name)}",
                    where=self.name,
                    fix="Give a positive number",
                )
        for name in ("kv_heads", "ffn", "positions", "patch_inputs"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"'{name}' must not be negative", where=self.name, fix="Use 0 for the default"
                )
        if self.hidden % self.heads:
            raise ConfigError(
                f"{self.heads} heads do not divide a hidden width of {self.hidden}",
                where=self.name,
                fix="Give a number of heads that divides it",
            )

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Width of all heads of keys, and of all heads of values."""
        return self.key_heads * self.head_width

    @property
    def inner(self) -> int:
        """Inner width of the feed-forward block."""
        return self.ffn or 4 * self.hidden

    @property
    def layer_matrix_parameters(self) -> int:
        """Weights of a layer's linear projections."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_width)
        return attention + self.hidden * self.inner * (3 if self.gated else 2)

    @property
    def layer_parameters(self) -> int:
        """All parameters of a layer: projections, biases, two norms."""
        norms = 2 * self.hidden * (2 if self.biases else 1)
        biases = 0
        if self.biases:
            inner = self.inner * (2 if self.gated else 1)
            biases = self.hidden + 2 * self.kv_width + self.hidden + inner + self.hidden
        return self.layer_matrix_parameters + norms + biases

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer."""
        inputs = self.patch_inputs or self.vocab
        return (inputs + self.positions) * self.hidden

    @property
    def output_parameters(self) -> int:
        """Parameters after the last layer that no other layer has: its norm, the output layer."""
        norm = self.hidden * (2 if self.biases else 1)
        return norm + (0 if self.tied else self.vocab * self.hidden)

    @property
    def parameters(self) -> int:
        """All parameters."""
        body = self.layers * self.layer_parameters
        return body + self.embedding_parameters + self.output_parameters

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward pass for a token, attention in full, nothing recomputed.

        Source: 6 for each weight of a product and 12 L h s for attention's two products (Narayanan
        et al., SC 2021, appendix; Korthikanti et al. 2022, appendix A), which count causal
        attention in full, as published figures do.
        """
        matrices = self.layers * self.layer_matrix_parameters + self.vocab * self.hidden
        return 6.0 * matrices + 12.0 * self.layers * self.hidden * self.sequence
