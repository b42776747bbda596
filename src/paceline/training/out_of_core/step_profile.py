"""The profile of a recorded or captured step: what a memory plan is made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.schedules.memory import ManagedTensor, RecomputedModule, StepProfile

if TYPE_CHECKING:
    from paceline.training.out_of_core.recording import AfterStep, Recording

LEAST_PART = 0.25  # of an interval is computing, however many pages it took


def profile_of(
    recording: Recording, state_bytes: dict[int, int], after_step: AfterStep, fault_s: float
) -> tuple[StepProfile, dict[tuple[str, int], int]]:
    """Return the profile of a recorded step, and the index in it of each tensor by kind and index.

    Args:
        recording: of one step, complete.
        state_bytes: of the optimizer's state, by its index.
        after_step: the interval before the next step.
        fault_s: seconds that a page took which came from the system; not counted as computing.
    """
    events = recording.events
    saved: dict[int, int] = {}
    needed: dict[int, int] = {}
    tensors: list[ManagedTensor] = []
    places: dict[tuple[str, int], int] = {}
    for at, event in enumerate(events):
        if event.kind == "saved":
            saved[event.number] = at
        elif event.kind == "needed":
            needed.setdefault(event.number, at)
    for index, begin in saved.items():
        # What no backward pass needs may be held until the step ends.
        end = needed.get(index, len(events) - 1)
        gone = recording.gone.get(index)
        if gone is None or gone > end:
            continue  # in memory all the time for other reasons
        places["activation", index] = len(tensors)
        name = recording.names.get(index, f"saved tensor {index}")
        # It became free somewhere in the interval before the event that saw it.
        idle = max(begin, gone - 1)
        tensors.append(ManagedTensor(name, "activation", events[begin].bytes, begin, idle, end))
    for at, event in enumerate(events):
        if event.kind == "state" and state_bytes.get(event.number):
            places["optimizer", event.number] = len(tensors)
            after = at + 1 - len(events)
            tensors.append(
                ManagedTensor(
                    f"state {event.number}",
                    "optimizer",
                    state_bytes[event.number],
                    after,
                    after,
                    at,
                )
            )
    last = len(events) - 1
    compute_s = [
        max(seconds - faults * fault_s, LEAST_PART * seconds)
        for seconds, faults in zip(
            [*recording.compute_s[:last], after_step.compute_s],
            [*recording.faults[:last], after_step.faults],
            strict=True,
        )
    ]
    floor = [*recording.peak_bytes[:last], after_step.peak_bytes]
    profile = StepProfile(
        compute_s=tuple(compute_s),
        floor_bytes=tuple(floor),
        tensors=tuple(tensors),
        modules=_recomputed_modules(recording, compute_s, tensors, places),
    )
    return profile, places


def _recomputed_modules(
    recording: Recording,
    compute_s: list[float],
    tensors: list[ManagedTensor],
    places: dict[tuple[str, int], int],
) -> tuple[RecomputedModule, ...]:
    """Return the modules that can be recomputed: they ran once, and saved something."""
    found = []
    for name, run in recording.modules.items():
        members = tuple(
            places["activation", number]
            for number in run.tensors
            if ("activation", number) in places
        )
        if not members or run.end is None or not run.is_once:
            continue
        needed = min(tensors[place].needed for place in members)
        if all(tensors[place].idle <= needed for place in members):
            seconds = sum(compute_s[max(run.begin - 1, 0) : run.end])
            found.append(RecomputedModule(name, seconds, needed, members))
    return tuple(found)
