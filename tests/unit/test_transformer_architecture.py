"""Architectures of published models, against the parameters that their authors count."""

import json

import pytest

from paceline.core.errors import ConfigError, NotFound, UsageError
from paceline.perf.transformer import Architecture, read_architecture
from paceline.perf.transformer.configurations import from_configuration
from paceline.perf.transformer.options import make_architecture

SHAPE = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
VISION = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
          "intermediate_size": 3072}  # fmt: skip
PUBLISHED = [
    ({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024,
      "vocab_size": 50257, "resid_pdrop": 0.1}, 124_439_808),
    ({"model_type": "llama", **SHAPE, "intermediate_size": 11008, "vocab_size": 32000,
      "max_position_embeddings": 4096}, 6_738_415_616),
    ({"model_type": "mistral", **SHAPE, "num_key_value_heads": 8, "intermediate_size": 14336,
      "vocab_size": 32000, "max_position_embeddings": 32768}, 7_241_732_096),
    ({"model_type": "mpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "max_seq_len": 2048,
      "vocab_size": 50432, "no_bias": True, "attn_config": {"alibi": True}}, 6_649_286_656),
    ({"model_type": "bloom", "n_layer": 24, "hidden_size": 1024, "n_head": 16, "seq_length": 2048,
      "vocab_size": 250880}, 559_214_592),
    ({"model_type": "bert", **VISION, "vocab_size": 30522, "max_position_embeddings": 512},
     109_482_240),
    ({"model_type": "vit", **VISION, "patch_size": 16, "image_size": 224}, 86_567_656),
    ({"model_type": "gpt_neox", "num_hidden_layers": 44, "hidden_size": 6144,
      "num_attention_heads": 64, "intermediate_size": 24576, "vocab_size": 50432,
      "max_position_embeddings": 2048}, 20_554_567_680),
]  # fmt: skip


@pytest.mark.parametrize(
    ("configuration", "parameters"), PUBLISHED, ids=lambda value: str(value)[:24]
)
def test_parameters_are_those_of_the_published_model(configuration, parameters):
    found = from_configuration(configuration)
    # BERT's pooler and segments, BLOOM's first norm and ViT's last bias are left out.
    assert found.parameters == pytest.approx(parameters, rel=0.006)


def test_flops_of_a_token_are_six_for_each_weight_and_attention_in_full():
    model = from_configuration(PUBLISHED[1][0])
    weights = model.parameters - model.embedding_parameters
    attention = 12 * 32 * 4096 * 4096
    assert model.flops_per_token == pytest.approx(6 * weights + attention, rel=1e-3)


def test_a_file_holds_either_form(tmp_path):
    published, own = tmp_path / "config.json", tmp_path / "own.json"
    published.write_text(json.dumps(PUBLISHED[0][0]))
    model = read_architecture(published)
    own.write_text(model.to_text())
    assert read_architecture(own) == model
    assert read_architecture(published, sequence=256).sequence == 256


def test_numbers_on_the_command_line_are_an_architecture():
    found = make_architecture("layers=2, hidden=64,heads=4,vocab=100,sequence=32,gated=true")
    assert found == Architecture(layers=2, hidden=64, heads=4, vocab=100, sequence=32, gated=True)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("layers=2,hidden=64", ConfigError, "key 'heads' is missing"),
        ("layer=2,hidden=64", ConfigError, "unknown key 'layer'"),
        ("layers=two,hidden=64", ConfigError, "layers"),
        ("layers=0,hidden=64,heads=4,vocab=9,sequence=9", ConfigError, "'layers' must be at least"),
        ("layers=2,hidden=64,heads=5,vocab=9,sequence=9", ConfigError, "do not divide"),
        ("none.json", NotFound, "none.json"),
    ],
)
def test_a_wrong_architecture_says_what_is_wrong(text, error, words):
    with pytest.raises(error, match=words):
        make_architecture(text)


def test_a_configuration_without_a_number_names_file_and_key(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 12, "n_head": 12}))
    with pytest.raises(ConfigError, match="key 'n_embd' is missing") as raised:
        read_architecture(path)
    assert raised.value.where == str(path)


def test_an_unknown_family_lists_the_known_ones():
    with pytest.raises(UsageError, match="mamba") as raised:
        from_configuration({"model_type": "mamba"})
    assert "llama" in raised.value.why
