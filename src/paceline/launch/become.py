"""Runs a command in this process's place, which ends with the process that started it.

``python -m paceline.launch.become PARENT SIGNAL COMMAND...``: the kernel sends SIGNAL to the
command when process PARENT is killed, so that a launcher such as torchrun ends its ranks, too.
"""

from __future__ import annotations

import os
import sys

from paceline.core.processes import die_with_parent


def main(argv: list[str]) -> int:
    """Replace this process by a command; return only if the system refuses that."""
    parent, number, *command = argv
    die_with_parent(int(parent), int(number))
    try:
        os.execvp(command[0], command)
    except OSError as problem:  # no interpreter, another architecture
        sys.stderr.write(f"cannot execute {command[0]}: {problem.strerror}\n")
        return 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
