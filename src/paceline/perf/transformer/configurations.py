"""Reads an Architecture from JSON: Paceline's own, or a published model's ``config.json``.

A published configuration names its family in ``model_type``; each family has names of its own for
the same numbers. No weights are read, and nothing is downloaded.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.errors import ConfigError, UsageError
from paceline.core.files import read_text
from paceline.perf.transformer.architecture import Architecture

if TYPE_CHECKING:
    from pathlib import Path


class _Family(NamedTuple):
    """Keys of a family's configuration, and what no key of it says."""

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    kv_heads: str = ""
    ffn: str = "intermediate_size"
    sequence: str = "max_position_embeddings"
    gated: bool = False
    tied: bool = True
    causal: bool = True
    learned_positions: bool = False
    rotary: bool = False
    biases: bool = True
    dropout: str = ""


_LLAMA = _Family(kv_heads="num_key_value_heads", gated=True, tied=False, rotary=True, biases=False)
_FAMILIES = {
    "gpt2": _Family("n_layer", "n_embd", "n_head", "", "n_inner", "n_positions",
                    learned_positions=True, dropout="resid_pdrop"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA._replace(tied=True),
    "phi3": _LLAMA,
    "mpt": _Family("n_layers", "d_model", "n_heads", "", "", "max_seq_len", biases=False),
    "bloom": _Family("n_layer", "hidden_size", "n_head", "", "", "seq_length",
                     dropout="hidden_dropout"),
    "bert": _Family(causal=False, learned_positions=True, dropout="hidden_dropout_prob"),
    "roberta": _Family(causal=False, learned_positions=True, dropout="hidden_dropout_prob"),
    "gpt_neox": _Family(tied=False, rotary=True),
    "opt": _Family(ffn="ffn_dim", learned_positions=True, dropout="dropout"),
    "vit": _Family(causal=False, tied=False, dropout="hidden_dropout_prob"),
}  # fmt: skip


def read_architecture(path: Path, *, sequence: int | None = None) -> Architecture:
    """Return the architecture that a JSON file describes.

    Args:
        path: of an Architecture, or of a published model's configuration.
        sequence: tokens of a sample, instead of the longest that the model allows.

    Raises:
        NotFound, StorageError, CorruptData: the file is missing or cannot be read.
        ConfigError: it is not JSON, or a number is missing or impossible.
        UsageError: its family is not known.
    """
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as problem:
        raise ConfigError(
            "a model's file is not JSON",
            where=str(path),
            why=str(problem),
            fix="Give an architecture or a config.json",
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(
            "a model's file must hold a JSON object", where=str(path), fix="Write it as {...}"
        )
    if "model_type" in data:
        return from_configuration(data, where=str(path), sequence=sequence)
    if sequence is not None:
        data = {**data, "sequence": sequence}
    return Architecture.from_json({"version": 1, **data}, where=str(path))


def from_configuration(
    data: dict[str, Any], *, where: str = "config.json", sequence: int | None = None
) -> Architecture:
    """Return the architecture of a published model from its configuration.

    Args:
        data: the configuration, with its ``model_type``.
        where: names it in errors.
        sequence: tokens of a sample; None: the longest that the model allows.

    Raises:
        ConfigError: a number is missing or impossible.
        UsageError: the family is not known.
    """
    kind = str(data["model_type"])
    family = _FAMILIES.get(kind)
    if family is None:
        raise UsageError(
            f"the architecture '{kind}' is not known",
            where=where,
            why=f"known: {', '.join(_FAMILIES)}",
            fix="Give layers, hidden, heads, ffn, vocab and sequence as JSON instead",
        )
    if kind == "vit":
        return _image_architecture(data, family, where)
    hidden = _number(data, family.hidden, where)
    longest = sequence or _number(data, family.sequence, where)
    ratio = int(data.get("expansion_ratio", 4)) if kind == "mpt" else 4
    return Architecture(
        name=_name(data, kind),
        layers=_number(data, family.layers, where),
        hidden=hidden,
        heads=_number(data, family.heads, where),
        kv_heads=_optional(data, family.kv_heads, where),
        ffn=_optional(data, family.ffn, where) or ratio * hidden,
        vocab=_number(data, "vocab_size", where),
        sequence=longest,
        gated=family.gated,
        tied=bool(data.get("tie_word_embeddings", family.tied)),
        causal=family.causal,
        positions=_positions(data, family, kind, longest),
        rotary=family.rotary,
        biases=family.biases and not data.get("no_bias", False),
        dropout=bool(family.dropout and data.get(family.dropout, 0)),
    )


def _positions(data: dict[str, Any], family: _Family, kind: str, longest: int) -> int:
    if kind == "mpt":
        attention = data.get("attn_config") or {}
        return 0 if attention.get("alibi") or attention.get("rope") else longest
    return int(data.get(family.sequence, longest)) if family.learned_positions else 0


def _image_architecture(data: dict[str, Any], family: _Family, where: str) -> Architecture:
    patch = _number(data, "patch_size", where)
    tokens = (_number(data, "image_size", where) // patch) ** 2 + 1
    return Architecture(
        name=_name(data, "vit"),
        layers=_number(data, family.layers, where),
        hidden=_number(data, family.hidden, where),
        heads=_number(data, family.heads, where),
        ffn=_number(data, family.ffn, where),
        vocab=len(data.get("id2label") or ()) or int(data.get("num_labels", 1000)),
        sequence=tokens,
        tied=False,
        causal=False,
        positions=tokens + 1,  # and the token of the class
        dropout=bool(data.get(family.dropout, 0)),
        patch_inputs=patch * patch * int(data.get("num_channels", 3)) + 1,  # and a bias
    )


def _name(data: dict[str, Any], kind: str) -> str:
    return str(data.get("_name_or_path") or kind).rsplit("/", 1)[-1] or kind


def _number(data: dict[str, Any], key: str, where: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        what = f"key '{key}' is missing" if value is None else f"key '{key}' is {value!r}"
        raise ConfigError(what, where=where, fix="Give a positive whole number")
    return value


def _optional(data: dict[str, Any], key: str, where: str) -> int:
    return _number(data, key, where) if key and data.get(key) is not None else 0
