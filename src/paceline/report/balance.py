"""What rebalancing did in a run, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.delays import BECAUSE
from paceline.report.units import format_seconds, format_share

if TYPE_CHECKING:
    from paceline.runs.balance import Balance, BalanceAction

_RANKS_MAX = 8  # whose samples a sentence lists


def balance_words(balance: Balance | None) -> str:
    """Return what rebalancing did; empty where it was not asked for."""
    if balance is None:
        return ""
    sentences = [_sentence(action, balance.actions) for action in balance.actions]
    found = [sentence for sentence in sentences if sentence]
    if not found:
        return "Rebalancing found no rank that is slower than the others for long."
    return " ".join(found)


def slow_node_lines(balance: Balance | None) -> list[str]:
    """Return a line for each rank that was slow at the end, which a scheduler can read."""
    return [node.sentence for node in balance.slow_nodes] if balance is not None else []


def _sentence(action: BalanceAction, actions: tuple[BalanceAction, ...]) -> str:
    match action.kind:
        case "found" if not any(
            other.kind == "rebalanced" and other.rank == action.rank for other in actions
        ):
            return f"Rank {action.rank} takes {_times(action)} as long{_because(action)}."
        case "rebalanced":
            return (
                f"From step {action.from_step} on {_samples(action.new_samples)}: rank "
                f"{action.rank} takes {_times(action)} as long for a sample as the "
                f"others{_because(action)}."
            )
        case "measured":
            gain = 1 - action.measured_step_s / max(1e-12, action.step_s)
            return (
                f"That brought steps of {format_seconds(action.measured_step_s)} in place of "
                f"{format_seconds(action.step_s)} ({format_share(abs(gain))} "
                f"{'shorter' if gain >= 0 else 'longer'}; "
                f"{format_seconds(action.predicted_step_s)} were predicted)."
            )
        case "undone":
            return (
                f"Steps became longer ({format_seconds(action.measured_step_s)} in place of "
                f"{format_seconds(action.step_s)}): undone, and not tried again."
            )
        case "restored":
            return f"From step {action.from_step} on {_samples(action.new_samples)}, as asked for."
    return ""


def _times(action: BalanceAction) -> str:
    return f"{action.ratio:.2g} times"


def _because(action: BalanceAction) -> str:
    return f", {BECAUSE[action.cause]}" if action.cause in BECAUSE else ""


def _samples(samples: tuple[int, ...]) -> str:
    """Return who has how many samples of a batch.

    >>> _samples((43, 21))
    'the ranks have 43 and 21 samples of a batch'
    >>> _samples(tuple(range(10, 30)))
    'the 20 ranks have 10 to 29 samples of a batch'
    """
    if len(samples) > _RANKS_MAX:
        least, most = min(samples), max(samples)
        return f"the {len(samples)} ranks have {least} to {most} samples of a batch"
    *first, last = map(str, samples)
    return f"the ranks have {', '.join(first)} and {last} samples of a batch"
