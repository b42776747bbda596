"""A job of many short steps: keeps its state when it is asked to stop, and goes on from there.

    queue_steps.py STEPS|FILE DONE [ignore]

Ends after so many steps, or when FILE is there, and appends a line to DONE then. Ranks keep a
state of their own each.
"""

import json
import os
import signal
import sys
from pathlib import Path

until, done = sys.argv[1], Path(sys.argv[2])
folder = Path(os.environ["PACELINE_QUEUE_FOLDER"])
rank = f"rank-{os.environ['RANK']} " if "RANK" in os.environ else ""
state = folder / f"state{rank.strip()}"
ignores = "ignore" in sys.argv

signals = {signal.SIGUSR1, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
step = int(state.read_text()) if state.exists() else 0
print(rank + "begins at step", step, "on cores", *sorted(os.sched_getaffinity(0)), flush=True)
while not Path(until).exists() and not (until.isdecimal() and step >= int(until)):
    came = signal.sigtimedwait(signals, 0.01)  # a step takes 10 ms, or as long as nobody asks
    step += 1
    with Path(os.environ["PACELINE_QUEUE_PROGRESS"]).open("a") as file:
        file.write(json.dumps({"work_done": step, "rate": 100.0}) + "\n")
    if came is not None and came.si_signo == signal.SIGTERM:
        sys.exit(143)
    if came is not None and not ignores:
        partial = state.with_suffix(".partial")
        partial.write_text(str(step))
        partial.replace(state)
        print(rank + "stopped after step", step, flush=True)
        sys.exit(75)
descriptor = os.open(done, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(descriptor, f"{os.environ['PACELINE_QUEUE_JOB']}\n".encode())
os.close(descriptor)
