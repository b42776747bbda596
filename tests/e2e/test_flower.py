"""Flower under our selection: a real deployment with TLS and keys, and its simulation."""

import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
APP = ROOT / "examples/flower_digits"
NODES = 4
DEADLINE_S = 420

# The last node of five never has the memory that training takes.
SHORT_OF_MEMORY = """

def train_in_memory(parameters, context):
    if context.node_config["partition-id"] == context.node_config["num-partitions"] - 1:
        raise MemoryError("1 MiB is free")
    return train(parameters, context)


app = make_client_app(samples, train_in_memory)
"""

pytestmark = pytest.mark.campaign("flower")


@pytest.fixture(scope="module")
def flower():
    """The programs of an environment with Flower; `scripts/campaign flower` makes it."""
    folder = os.environ.get("FLOWER_BIN", "")
    if not (folder and Path(folder, "flwr").exists()):
        pytest.skip("no Flower here")
    return Path(folder)


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def make_certificates(folder):
    """Make a certificate authority, and a certificate of it for this host."""

    def openssl(*words):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=60)

    authority, key = folder / "ca.pem", folder / "ca.key"
    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=authority"),
        *("-keyout", key, "-out", authority),
    )
    request, names = folder / "server.csr", folder / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"),
        *("-keyout", folder / "server.key", "-out", request),
    )
    openssl(
        *("x509", "-req", "-in", request, "-CA", authority, "-CAkey", key, "-CAcreateserial"),
        *("-days", "2", "-extfile", names, "-out", folder / "server.pem"),
    )


def make_key(folder, name):
    """Make a node's pair of keys; return the paths of the private and the public one."""
    private = folder / name
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", private],
        check=True,
        timeout=60,
    )
    return private, private.with_suffix(".pub")


@pytest.fixture
def deployment(flower, tmp_path):
    """A SuperLink with TLS that knows four nodes' keys, and what starts nodes and programs."""
    if not (shutil.which("openssl") and shutil.which("ssh-keygen")):
        pytest.skip("no Flower here")
    make_certificates(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    port, *node_ports = free_ports(NODES + 2)
    address = f"localhost:{port}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\n'
        f'root-certificates = "{tmp_path / "ca.pem"}"\n'
    )
    environ = {
        **os.environ,
        "PATH": f"{flower}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OPENBLAS_NUM_THREADS": "1",
    }

    with ExitStack() as stack:

        def start(name, *words):
            log = stack.enter_context((tmp_path / f"{name}.log").open("w"))
            process = subprocess.Popen(
                [flower / words[0], *map(str, words[1:])],
                env=environ,
                stdout=log,
                stderr=log,
                cwd=tmp_path,
                start_new_session=True,
            )
            stack.callback(process.wait, 30)
            stack.callback(os.killpg, process.pid, 9)
            return process

        def flwr(*words, timeout=DEADLINE_S):
            return subprocess.run(
                [flower / "flwr", *map(str, words)],
                env=environ,
                capture_output=True,
                text=True,
                timeout=timeout,
                cwd=tmp_path,
            )

        start(
            "superlink",
            *("flower-superlink", "--disable-runtime-dependency-installation"),
            *("--host", "127.0.0.1", "--port", port, "--enable-supernode-auth"),
            *("--ssl-certfile", tmp_path / "server.pem", "--ssl-keyfile", tmp_path / "server.key"),
            *("--ssl-ca-certfile", tmp_path / "ca.pem"),
        )

        def start_node(number, private):
            return start(
                f"node{number}",
                *("flower-supernode", "--superlink", address, "--port", node_ports[number]),
                *("--root-certificates", tmp_path / "ca.pem"),
                *("--auth-supernode-private-key", private),
                *("--node-config", f"partition-id={number % NODES} num-partitions={NODES}"),
            )

        yield flwr, start_node, tmp_path


def test_authenticated_nodes_train_and_a_stranger_is_refused(deployment):
    flwr, start_node, folder = deployment
    pairs = [make_key(folder, f"key{number}") for number in range(NODES)]
    deadline_s = time.monotonic() + DEADLINE_S
    while (said := flwr("supernode", "register", pairs[0][1], "here", timeout=60)).returncode:
        assert time.monotonic() < deadline_s, said.stdout + said.stderr
    for _, public in pairs[1:]:
        said = flwr("supernode", "register", public, "here", timeout=60)
        assert said.returncode == 0, said.stdout + said.stderr
    for number, (private, _) in enumerate(pairs):
        start_node(number, private)
    start_node(NODES, make_key(folder, "stranger")[0])
    result = folder / "result.json"
    data = ROOT.parent / "shared/data/fashion-mnist"
    images = data if data.exists() else ""  # then the digits of scikit-learn
    config = f"rounds=3 clients={NODES} cohort=2 folder='{images}' result='{result}'"
    said = flwr("run", APP, "here", "--stream", "--run-config", config)
    logs = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in folder.glob("*.log"))
    assert result.exists(), said.stdout + said.stderr + logs
    found = json.loads(result.read_text())
    assert len(found["accuracy"]) == 3
    assert found["accuracy"][-1] > 0.5
    assert sum(found["returned"]) >= 6
    assert found["refused"] == []
    listed = flwr("supernode", "list", "here", "--format", "json", timeout=60)
    nodes = json.loads(listed.stdout)["nodes"]
    assert [node["status"] for node in nodes] == ["online"] * NODES
    assert "Receiving" in (folder / "node0.log").read_text()
    assert "Receiving" not in (folder / f"node{NODES}.log").read_text()


def test_flowers_simulation_trains_under_our_selection(flower, tmp_path):
    if not (flower / "ray").exists():
        pytest.skip("no simulation of Flower here")
    home = tmp_path / "home"
    home.mkdir()
    environ = {
        **os.environ,
        "PATH": f"{flower}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OPENBLAS_NUM_THREADS": "1",
    }

    def flwr(*words):
        return subprocess.run(
            [flower / "flwr", *map(str, words)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            cwd=tmp_path,
        )

    result, app = tmp_path / "result.json", tmp_path / "app"
    shutil.copytree(APP, app)
    with (app / "digits_federation/client.py").open("a") as client:
        client.write(SHORT_OF_MEMORY)
    try:
        nodes = ("--num-supernodes", NODES + 1)
        flwr("federation", "simulation-config", "@none/default", "local", *nodes)
        config = f"rounds=4 clients={NODES + 1} cohort=2 result='{result}'"
        said = flwr("run", app, "local", "--stream", "--run-config", config)
        assert result.exists(), said.stdout[-3000:] + said.stderr[-3000:]
    finally:
        end_processes_of(home)  # `flwr run` leaves a SuperLink running
    found = json.loads(result.read_text())
    assert len(found["accuracy"]) >= 4
    assert found["accuracy"][-1] > 0.5
    assert len(found["returned"]) == NODES  # all took part but the one without memory
    assert set(found["refused"]) <= {"too little memory: '1 MiB is free'"}
    assert len(found["refused"]) == 1
    assert found["memory_bytes"] > 2**20


def end_processes_of(home):
    """End the processes whose FLWR_HOME is the test's own."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), 9)
        except OSError:  # it has ended, or is not ours
            continue
