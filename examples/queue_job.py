"""Train a small model as a job of a queue: preempted at any step, it goes on from its checkpoint.

    paceline queue serve --once &
    paceline queue submit --wait -- python examples/queue_job.py --steps 2000

What a queue asks of a job is here: on its signal it finishes the step, saves its state into
PACELINE_QUEUE_FOLDER and ends with exit code 75; when it is started again, it loads that state. Its
weights after the last step are those of a run that was never stopped. Also on several ranks:

    paceline queue submit -n 2 --ranks --wait -- examples/queue_job.py --steps 2000
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

TRY_AGAIN = 75  # EX_TEMPFAIL: start me again


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--checkpoint-every", type=int, default=500, metavar="STEPS")
    options = parser.parse_args()
    folder = Path(os.environ.get("PACELINE_QUEUE_FOLDER", "."))

    asked_to_stop = []  # a handler may run at any moment: it only takes a note
    signal.signal(signal.SIGUSR1, lambda *_: asked_to_stop.append(True))

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = load(folder / "checkpoint.pt", model, optimizer)
    reported_s, reported = time.perf_counter(), step
    while step < options.steps:
        # The data of a step depend on its number alone, whenever it is trained.
        data = torch.Generator().manual_seed(step * ranks + rank)
        x = torch.randn(64, 32, generator=data)
        loss = nn.functional.mse_loss(model(x), x[:, :1].sin())
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            average(parameter.grad, ranks)
        optimizer.step()
        step += 1
        stop = any_rank(bool(asked_to_stop), ranks)
        if rank == 0 and (stop or step % options.checkpoint_every == 0 or step == options.steps):
            save(folder / "checkpoint.pt", model, optimizer, step)
            now_s = time.perf_counter()
            report(step, (step - reported) / (now_s - reported_s))
            reported_s, reported = now_s, step
        if stop and step < options.steps:
            print(f"stopped after step {step}", flush=True)
            return TRY_AGAIN
    # A signal that comes while the interpreter ends would kill a job that has succeeded.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if rank == 0:
        digest = sum(parameter.double().sum().item() for parameter in model.parameters())
        print(f"{step} steps, sum of weights {digest:.12f}", flush=True)
    return 0


def average(gradient: torch.Tensor, ranks: int) -> None:
    """Replace a gradient by its mean over ranks."""
    if ranks > 1:
        torch.distributed.all_reduce(gradient)
        gradient /= ranks


def any_rank(flag: bool, ranks: int) -> bool:
    """Return whether a rank was asked to stop: all stop after the same step, or none."""
    if ranks == 1:
        return flag
    flags = torch.tensor(float(flag))
    torch.distributed.all_reduce(flags)
    return bool(flags)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Replace the checkpoint as a whole: the job may be killed at any moment."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the checkpoint, if there is one; return the steps that it has behind it."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def report(step: int, steps_per_s: float) -> None:
    """Tell the queue how far the job is: a line of JSON at the end of a file."""
    path = os.environ.get("PACELINE_QUEUE_PROGRESS")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps({"work_done": step, "rate": steps_per_s}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
