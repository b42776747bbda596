"""The user's token: made once, private, and refused by name where it is of no use."""

import os
import stat
import threading

import pytest

from paceline.core.errors import UsageError
from paceline.core.token import find_token, token_path


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    return tmp_path / "settings"


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_first_who_asks_makes_it_and_only_its_user_can_read_it(settings, mask):
    before = os.umask(mask)
    try:
        token = find_token()
    finally:
        os.umask(before)
    assert len(token) == 64
    assert find_token() == token
    assert token_path() == settings / "paceline" / "token"
    assert stat.S_IMODE(token_path().stat().st_mode) == 0o600
    assert [path.name for path in token_path().parent.iterdir()] == ["token"]


def test_all_who_are_first_have_the_same():
    found, begin = [], threading.Barrier(16)

    def ask():
        begin.wait()
        found.append(find_token())

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"", 0o600, "it is empty"),
        (b"\n \n", 0o600, "it is empty"),
        (b"\xff\xfe\x00secret", 0o600, "it is no text"),
        (b"x" * 5000, 0o600, "longer than"),
        (b"secret", 0o604, "its mode is 0604"),
        (b"secret", 0o602, "its mode is 0602"),
    ],
)
def test_a_file_of_no_use_is_refused_and_its_content_is_not_shown(tmp_path, content, mode, said):
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(UsageError, match=said) as refused:
        find_token(path)
    assert str(path) in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_file_that_a_group_shares_is_taken(tmp_path):
    path = tmp_path / "token"
    path.write_text("of a group\n")
    path.chmod(0o640)
    assert find_token(path) == "of a group"


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="there is no such token file") as refused:
        find_token(tmp_path / "missing")
    assert str(tmp_path / "missing") in str(refused.value)


def test_where_it_cannot_be_made_another_place_is_named(settings):
    settings.write_text("a file where the folder should be")
    with pytest.raises(UsageError, match="XDG_CONFIG_HOME"):
        find_token()
