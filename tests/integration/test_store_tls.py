"""Nodes and their clients over TLS: the same bytes, and not a word without the right key."""

import datetime
import socket
import ssl
import threading

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.launching import paceline

from paceline import native, store
from paceline.core.errors import Missing, RankLost, UsageError
from paceline.store.serve.card import NodeAddress
from paceline.store.serve.links import encryption, tcp_connector
from paceline.store.serve.node import NodeOptions, StoreNode
from paceline.store.serve.remote_pack import open_remote

LOOPBACK = NodeAddress(host="127.0.0.1", port=0)
TOKEN = "correct horse battery staple"
WAIT_S = 30.0


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    random = np.random.default_rng(4)
    samples = store.Samples([(f"{k:02}", random.bytes(int(k) * 2_000)) for k in range(60)])
    store.pack(samples, folder / "pack", options=store.PackOptions(shard_bytes=500_000))
    with store.open_pack(folder / "pack") as opened:
        assert opened.shard_count > 4
        yield opened


def options(**changed):
    return NodeOptions(**{"listen": LOOPBACK, "token": TOKEN, "tls": True, **changed})


def test_nodes_stage_from_each_other_and_are_read_over_tls(pack, tmp_path):
    with (
        StoreNode(pack.path, options(local=tmp_path / "a", replicas=2)) as first,
        StoreNode(
            pack.path,
            options(local=tmp_path / "b", replicas=2, peers=(NodeAddress.parse(first.name),)),
        ) as second,
    ):
        first.join([second.name])
        for _ in range(50):
            for node in (first, second):
                node.beat()
                node.finish_copies()
        everything = set(range(pack.shard_count))
        assert (first.members.held, second.members.held) == (everything, everything)
        read = sum(node.source_bytes for node in (first, second))
        assert read == sum(pack.index.shard_lengths.tolist())
        with open_remote(
            pack.path, [first.name], replicas=2, token=TOKEN, tls=True, maps_files=False
        ) as remote:
            for sample in range(len(pack)):
                assert remote.read(sample) == pack.read(sample)
            assert remote.tier_bytes.nodes > 0


def test_who_leaves_tls_out_or_has_another_token_is_refused(pack):
    with StoreNode(pack.path, options()) as node:
        plain = tcp_connector(pack.identity, TOKEN)(node.name)
        with pytest.raises(RankLost, match="TLS"):
            plain.card(WAIT_S)
        other = tcp_connector(pack.identity, TOKEN[::-1], tls=True)(node.name)
        with pytest.raises(UsageError, match="agree on TLS"):
            other.card(WAIT_S)
        assert node.stats().refused_connections == 2
    with StoreNode(pack.path, options(tls=False)) as node:
        encrypted = tcp_connector(pack.identity, TOKEN, tls=True)(node.name)
        with pytest.raises(RankLost, match="without TLS"):
            encrypted.card(WAIT_S)


def certificate(folder):
    """Write a certificate that signs itself, with its key; return the file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = folder / "node.pem"
    path.write_bytes(key.private_bytes(encoding, form, none) + made.public_bytes(encoding))
    return path


def test_a_certificate_does_not_stand_in_for_the_key(pack, tmp_path):
    """A server that pretends to be a node shows a certificate: it does not even hear a hello."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path))
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            connection, _ = listener.accept()
            try:
                with connection, context.wrap_socket(connection, server_side=True) as encrypted:
                    heard.append(encrypted.recv(1))
            except (ssl.SSLError, ConnectionError) as problem:
                heard.append(problem)

        thread = threading.Thread(target=pretend)
        thread.start()
        name = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UsageError, match="agree on TLS"):
            tcp_connector(pack.identity, TOKEN, tls=True)(name).card(WAIT_S)
        thread.join(WAIT_S)
    assert isinstance(heard[0], ssl.SSLError | ConnectionError)


def test_a_token_that_can_be_guessed_and_a_missing_library_are_said(pack, monkeypatch):
    with pytest.raises(UsageError, match="at least 16 characters, got 6"):
        StoreNode(pack.path, options(token="secret"))

    def absent(token):
        raise RuntimeError("neither libssl.so.3 nor libssl.so.1.1 is installed")

    monkeypatch.setattr(native, "TlsContext", absent)
    with pytest.raises(Missing, match=r"libssl\.so\.3"):
        encryption(TOKEN)


def test_status_of_nodes_with_tls(pack, tmp_path):
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "token").chmod(0o600)
    words = ("store", "status", pack.path, "--token-file", tmp_path / "token")
    with StoreNode(pack.path, options()) as node:
        done = paceline(tmp_path, *words, "--nodes", node.name, "--tls")
        assert done.code == 0, done.err
        assert node.name in done.out
        without = paceline(tmp_path, *words, "--nodes", node.name)
        assert without.code == 5
        assert "as one with TLS does" in without.out
