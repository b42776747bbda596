"""The names of the accounts between which tokens move, and what each is for.

::

    issued                  the only account below zero: its debt is the tokens in circulation
    treasury                what consumers deposited and no run has reserved yet
    escrow:budget:RUN       the budget of a run, fixed before its first round
    escrow:pay:CLIENT       pay that waits for the end of its audit delay
    escrow:stake:CLIENT     what a client loses if misbehaviour is proven
    client:CLIENT           what a client may spend
    infrastructure          what the training infrastructure earned
    slashed                 what was taken from clients; nobody is paid from it

Amounts are integers, in micro-tokens: 1 token = 1,000,000 micro-tokens. Nothing is ever rounded.
"""

from __future__ import annotations

from paceline.core.errors import UsageError

MICRO_TOKENS = 1_000_000
# Half of what SQLite's integers hold, so that no sum of two balances overflows.
MAX_SUPPLY = 2**62

ISSUED = "issued"
TREASURY = "treasury"
INFRASTRUCTURE = "infrastructure"
SLASHED = "slashed"
_MAX_NAME = 200


def spendable(client: str) -> str:
    """Return the account of what a client may spend."""
    return f"client:{client}"


def held_pay(client: str) -> str:
    """Return the account of a client's pay within its audit delay."""
    return f"escrow:pay:{client}"


def stake(client: str) -> str:
    """Return the account of a client's stake."""
    return f"escrow:stake:{client}"


def budget(run: str) -> str:
    """Return the account of what a run may still spend."""
    return f"escrow:budget:{run}"


def check_name(name: str, what: str) -> str:
    """Return the name of a client, a run or a reference, which becomes part of accounts and keys.

    Raises:
        UsageError: it is empty, too long, or has characters that cannot be printed.
    """
    if not isinstance(name, str) or not name or len(name) > _MAX_NAME or not name.isprintable():
        raise UsageError(
            f"{what} is no name: {name!r:.80}",
            fix=f"Give 1 to {_MAX_NAME} printable characters",
        )
    return name


def check_amount(amount: int, what: str) -> int:
    """Return an amount in micro-tokens.

    Raises:
        UsageError: it is not an integer above 0, or more than there can be.
    """
    if type(amount) is not int or not 0 < amount <= MAX_SUPPLY:
        raise UsageError(
            f"{what} cannot be {amount!r:.80} micro-tokens",
            fix=f"Give an integer from 1 to {MAX_SUPPLY:,}; 1 token is {MICRO_TOKENS:,}",
        )
    return amount
