"""Runs the verbs that must do without torch."""

from __future__ import annotations

import subprocess
import sys

from support import forking

DEADLINE_S = 120
_WITHOUT_TORCH = """
import sys
from paceline.cli.app import main
try:
    main()
finally:
    assert "torch" not in sys.modules, "torch was loaded"
"""


def without_torch(*args, **options):
    """Run the command line to its end, in a process that fails if it loads torch.

    Options are those of `subprocess.run`; stdout and stderr are captured unless they are given.
    """
    captured = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": DEADLINE_S}
    return forking.run([sys.executable, "-c", _WITHOUT_TORCH, *args], **(captured | options))
