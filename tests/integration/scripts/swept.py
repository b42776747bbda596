"""A script that characterize sweeps: some steps of work; in one cell it may kill what started it.

swept.py BATCH RANKS RESULT MARK [SIGNAL]     MARK: made when the signal was sent, once
"""

import json
import os
import signal
import sys
from pathlib import Path

import paceline

batch, ranks, result, mark = (
    int(sys.argv[1]),
    int(sys.argv[2]),
    Path(sys.argv[3]),
    Path(sys.argv[4]),
)
is_first = os.environ["RANK"] == "0"
for step in range(40):
    sum(range(1000 * batch))
    paceline.step()
    if len(sys.argv) > 5 and ranks == 2 and is_first and step == 20 and not mark.exists():
        if sys.argv[5] == "raise":
            raise ValueError("it does not run on two ranks")
        mark.touch()
        os.kill(os.getppid(), signal.Signals[sys.argv[5]])
        signal.pause()  # the launcher ends this rank
if is_first:
    result.write_text(json.dumps({"accuracy": 0.5 + batch / 100}))
