"""An unchanged script of Keras on TensorFlow trains from nodes as from the folder.

TensorFlow is 1.5 GB and has an environment of its own, which KERAS_ENV names:
python3 -m venv ENV && ENV/bin/pip install tensorflow-cpu keras pillow.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.launching import last_json, paceline

from paceline import store

Image = pytest.importorskip("PIL.Image")
ENVIRONMENT = os.environ.get("KERAS_ENV", "")
SCRIPT = Path(__file__).parents[2] / "bench" / "mounted" / "keras_cnn.py"
pytestmark = [
    pytest.mark.campaign("e2e"),
    pytest.mark.skipif(not ENVIRONMENT, reason="no environment with Keras is named"),
]


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_keras_trains_from_nodes_as_from_the_folder(tmp_path, codec):
    random = np.random.default_rng(2)
    for number in range(64):
        place = tmp_path / "plain" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 255, (48, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number:03}.jpg")
    options = store.PackOptions(codec=codec, shard_bytes=20_000)
    store.pack(store.Folder(tmp_path / "plain"), tmp_path / "pack", options=options)
    script = (Path(ENVIRONMENT) / "bin" / "python", SCRIPT)
    run = ("run", "--no-record", "--out")
    plain = paceline(tmp_path, *run, "PLAIN", *script, tmp_path / "plain", 1)
    assert plain.code == 0, plain.err
    mount = f"{tmp_path / 'pack'}:/mnt/x"
    mounted = paceline(tmp_path, *run, "RUN", "--data", mount, *script, "/mnt/x", 1)
    assert mounted.code == 0, mounted.err
    found, expected = last_json(mounted.out), last_json(plain.out)
    assert found["samples"] == expected["samples"] == 64
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)  # threads add in any order
    (report,) = [json.loads(path.read_text()) for path in (tmp_path / "RUN" / "data").iterdir()]
    size = sum(path.stat().st_size for path in (tmp_path / "pack").glob("shard-*"))
    assert (report["source_bytes"], report["program_source_bytes"]) == (size, 0)
