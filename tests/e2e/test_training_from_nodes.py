"""An unchanged PyTorch script trains on two hosts from a pack that is spread over them."""

import json

import numpy as np
import pytest
from support.launching import SCRIPTS, Launched, free_endpoint, last_json, paceline
from support.networks import network, require_networks

from paceline import store
from paceline.report.model import gather
from paceline.trace.format.events import Kind

pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.campaign("e2e")
TRAIN = SCRIPTS / "train_folder.py"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return a folder of images by class, and a pack of it in several shards."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(4)
    for number in range(96):
        place = folder / "plain" / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 255, (48, 48), dtype=np.uint8)
        pixels[:, (number % 3) * 16 : (number % 3) * 16 + 16] = 255
        Image.fromarray(pixels).save(place / f"{number:03}.png")
    store.pack(
        store.Folder(folder / "plain"),
        folder / "pack",
        options=store.PackOptions(shard_bytes=20_000),
    )
    return folder


@pytest.mark.parametrize("workers", [2])
def test_training_from_the_nodes_is_training_from_the_plain_folder(images, tmp_path, workers):
    require_networks()
    plain = paceline(
        tmp_path,
        *("run", "-n", 2, "--no-record", "--out", "PLAIN", TRAIN, images / "plain", workers),
    )
    assert plain.code == 0, plain.err
    with network(2) as hosts:
        endpoint = free_endpoint(hosts[0][0])
        tasks = [
            Launched(
                tmp_path,
                *("run", "--out", "RUN", "--nnodes", 2, "--node-rank", number),
                *("--rdzv-endpoint", endpoint),
                *("--data", f"{images / 'pack'}:/mnt/x", TRAIN, "/mnt/x", workers),
                prefix=prefix,
                env={"GLOO_SOCKET_IFNAME": "eth0"},
            )
            for number, (_, prefix) in enumerate(hosts)
        ]
        done = [task.wait() for task in tasks]
    assert [task.code for task in done] == [0, 0], done[0].err + done[1].err
    assert last_json(done[0].out) == last_json(plain.out)
    assert last_json(plain.out)["images"] == 96
    reports = [json.loads(path.read_text()) for path in (tmp_path / "RUN" / "data").iterdir()]
    source = sum(path.stat().st_size for path in (images / "pack").glob("shard-*"))
    assert sum(report["source_bytes"] for report in reports) == source
    assert all(report["peer_bytes"] > 0 for report in reports)
    for task in done:
        assert task.running() == []
    report = gather(tmp_path / "RUN")
    assert len(report.data.nodes) == 2
    assert report.data.headroom is not None
    for rank in report.trace.ranks:  # each is the first of its node
        counters = rank.events_of(Kind.COUNTER)
        for name in ("data_local_bytes", "data_peer_bytes"):
            assert counters["amount"][counters["name"] == rank.names.index(name)].sum() > 0
