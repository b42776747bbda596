"""Names that people guess: the right command in one step."""

import doctest

import click
import pytest
from click.testing import CliRunner

from paceline.cli import app, other_names
from paceline.cli.other_names import ALIASES, QUESTIONS, meant_by
from paceline.core.errors import UsageError


def command_of(words):
    """Return the command of these words, or None."""
    found = app.app
    with click.Context(app.app) as context:
        for word in words:
            if not isinstance(found, click.Group) or word not in found.list_commands(context):
                return None
            found = found.get_command(context, word)
    return found


def test_the_examples():
    assert doctest.testmod(other_names).failed == 0


@pytest.mark.parametrize("guess", sorted(ALIASES), ids=" ".join)
def test_a_guess_is_no_command_and_means_one(guess):
    assert command_of(guess) is None
    meant = ALIASES[guess]
    assert meant == ("--version",) or isinstance(command_of(meant), click.Command)


def test_names_with_several_meanings_name_commands_that_exist():
    for name, answer in QUESTIONS.items():
        assert command_of([name]) is None
        with pytest.raises(UsageError, match=f"there is no command '{name}'") as caught:
            meant_by([name, "x"])
        assert caught.value.fix == answer
        for part in answer.split("paceline ")[1:]:
            words = [word.strip(".,") for word in part.split()]
            assert command_of(words[:1]) is not None, (name, words)


def test_what_follows_a_guess_stays_and_what_is_no_guess_too():
    assert meant_by(["launch", "-n", "2", "x.py", "compare"]) == [
        "run",
        "-n",
        "2",
        "x.py",
        "compare",
    ]
    assert meant_by(["run", "compare"]) == ["run", "compare"]
    assert meant_by(["help"]) == ["--help"]
    assert meant_by(["help", "compare"]) == ["trace", "compare", "--help"]
    assert meant_by([]) == []
    assert meant_by(["--json"]) == ["--json"]


@pytest.mark.parametrize("option", ["-n", "--ranks", "--nproc-per-node", "--nproc_per_node"])
def test_ranks_have_the_names_of_torchrun_too(option, tmp_path):
    (tmp_path / "x.py").write_text("")
    words = ["run", option, "2", "--dry-run", str(tmp_path / "x.py")]
    done = CliRunner().invoke(app.app, words)
    assert done.exit_code == 0, done.output
    assert "on 2 ranks" in done.output
