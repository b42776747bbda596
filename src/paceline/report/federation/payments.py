"""What clients were paid, and that no token was lost: as rows of text and a chart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.report.page import svg
from paceline.report.page.chart import FIELD, Chart, line_sample, numbered_line, vertical_scale
from paceline.report.units import format_share

if TYPE_CHECKING:
    from paceline.report.federation.model import FederationPay

_MICRO = 1_000_000
_HEIGHT_PX = 200.0


def tokens(micro: int) -> str:
    """Return micro-tokens as tokens, to a hundredth.

    >>> tokens(1_234_567_890)
    '1,234.57'
    """
    return f"{micro / _MICRO:,.2f}"


def flows(pay: FederationPay) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: where the tokens are in the end; the last row is their sum."""
    rows = [
        [name, tokens(amount), format_share(amount / pay.issued if pay.issued else 0.0)]
        for name, amount in pay.flows
    ]
    total = sum(amount for _, amount in pay.flows)
    return ["account", "tokens", "share"], [*rows, ["all accounts", tokens(total), ""]]


def conservation(pay: FederationPay) -> str:
    """Return whether the accounts add up to what was issued, and what a verification found."""
    total = sum(amount for _, amount in pay.flows)
    if total == pay.issued:
        sums = f"The accounts add up to the {tokens(pay.issued)} tokens that were issued, exactly."
    else:
        sums = (
            f"The accounts add up to {tokens(total)} tokens, and {tokens(pay.issued)} were issued."
        )
    return f"{sums} {pay.verification}"


def balances(pay: FederationPay) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: what each client earned, the most first."""
    ordered = sorted(pay.by_client.items(), key=lambda item: (-item[1], item[0]))
    return ["client", "tokens"], [[client, tokens(amount)] for client, amount in ordered]


def pay_by_client(pay: FederationPay) -> Chart:
    """Return what clients earned, in ascending order."""
    amounts = np.sort(np.array(list(pay.by_client.values()), np.float64)) / _MICRO
    top = max(1.0, float(amounts.max(initial=0.0)))
    marks, labels = vertical_scale(top, 5, _HEIGHT_PX, "tokens", ",.0f")
    x = np.linspace(0, FIELD, amounts.size) if amounts.size > 1 else np.zeros(amounts.size)
    points = list(zip(x.tolist(), (_HEIGHT_PX * (1 - amounts / top)).tolist(), strict=True))
    marks.append(svg.polyline(points, numbered_line(0)))
    return Chart(
        name="pay",
        title="Tokens by client",
        description="What clients earned, for each share of the clients, in ascending order.",
        unit="percent of clients",
        end=100.0,
        height_px=_HEIGHT_PX,
        marks=marks,
        labels=labels,
        legend=[(line_sample(numbered_line(0)), "earned, in ascending order")],
    )
