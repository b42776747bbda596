"""``paceline fed ledger``: verify, export and read the token ledger of a federation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.streams import terminal

if TYPE_CHECKING:
    from paceline.federated.ledger import ExpectedBlock, Ledger, LedgerReport
    from paceline.federated.ledger.statement import LedgerStatement

_CORRUPT = 4


@click.group(epilog="Example: paceline fed ledger verify federation.db")
def ledger() -> None:
    """Verify, export and read the token ledger of a federation.

    Nothing here writes to the ledger; the federation itself does.
    """


_path = click.argument("path", metavar="LEDGER", type=click.Path(path_type=Path))


@ledger.command(epilog="Example: paceline fed ledger verify federation.db. Exit code 4: damaged")
@_path
@click.option(
    "--expect",
    metavar="NUMBER:HASH",
    help="A block's hash that was noted elsewhere: finds a ledger that was rewritten or cut.",
)
@click.option(
    "--public-key",
    metavar="KEY",
    help="The server's key, 64 hexadecimal digits, as its operator gives it: finds a ledger that "
    "was signed by another.",
)
@click.option("--receipts", is_flag=True, help="Check the signatures of all payments too (slower).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def verify(
    path: Path, expect: str | None, public_key: str | None, receipts: bool, as_json: bool
) -> None:
    """Check every row of LEDGER; name the first bad one."""
    from paceline.federated.ledger import Ledger

    expected = _expected(expect)
    if public_key is not None and not _is_hexadecimal(public_key):
        raise click.BadParameter(
            f"{public_key!r} is not 64 hexadecimal digits", param_hint="--public-key"
        )
    shows = sys.stderr.isatty()
    with Ledger.read(path) as opened:
        report = opened.verify(
            expected=expected,
            public_key=public_key,
            with_receipts=receipts,
            on_progress=_show if shows else None,
        )
    if shows:
        click.echo("\r\x1b[K", nl=False, file=terminal())
    if as_json:
        click.echo(report.to_text(), nl=False)
    else:
        _print_report(path, report)
    if not report.ok:
        sys.exit(_CORRUPT)


@ledger.command(
    epilog="Example: paceline fed ledger export federation.db --format csv --out pay.csv"
)
@_path
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv"]),
    default="jsonl",
    show_default=True,
    help="Blocks with all that was hashed, or postings for a spreadsheet.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="A new file [default: standard output]."
)
def export(path: Path, form: str, out: Path | None) -> None:
    """Write all of LEDGER, for its operator alone."""
    from paceline.core.errors import DestinationExists
    from paceline.core.files import commit_chunks
    from paceline.federated.ledger import Ledger

    with Ledger.read(path) as opened:
        _warn_of_damage(opened)
        lines = opened.csv_lines() if form == "csv" else opened.json_lines()
        if out is None:
            for line in lines:
                click.echo(line)
        elif out.exists():
            raise DestinationExists("a file is there already", where=str(out), fix="Name a new one")
        else:
            commit_chunks(out, (f"{line}\n".encode() for line in lines))


@ledger.command(epilog="Example: paceline fed ledger statement federation.db --client hospital-a")
@_path
@click.option("--client", required=True, help="The id with which the client takes part.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with signatures.")
def statement(path: Path, client: str, as_json: bool) -> None:
    """Show one client its own transactions."""
    from paceline.federated.ledger import Ledger

    with Ledger.read(path) as opened:
        _warn_of_damage(opened)
        made = opened.statement(client)
    if as_json:
        click.echo(made.to_text(), nl=False)
    else:
        _print_statement(made)


def _expected(text: str | None) -> ExpectedBlock | None:
    """Return the block that ``--expect`` names."""
    from paceline.federated.ledger import ExpectedBlock

    if text is None:
        return None
    number, _, hashed = text.partition(":")
    if not number.isdecimal() or not _is_hexadecimal(hashed):
        raise click.BadParameter(
            f"{text!r} is not a block's number, a colon, and 64 hexadecimal digits",
            param_hint="--expect",
        )
    return ExpectedBlock(int(number), hashed)


def _warn_of_damage(opened: Ledger) -> None:
    """Say that a ledger is damaged; what is in it is shown all the same."""
    damage = opened.verify().damage
    if damage is not None:
        click.echo(f"warning: the ledger is damaged: {damage.text()}", err=True)


def _show(done: int, blocks: int) -> None:
    click.echo(f"\r\x1b[Kblock {done:,} of {blocks:,}", nl=False, file=terminal())


def _is_hexadecimal(text: str) -> bool:
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def _print_report(path: Path, report: LedgerReport) -> None:
    whose = "the server's" if report.is_expected_key else "those of the key below"
    signatures = {
        "checked": f"their signatures are {whose}",
        "none": "not signed: the hashes alone chain them",
        "unchecked": "signatures NOT checked: pip install 'paceline[ledger]'",
    }[report.signatures]
    click.echo(f"{path}: ledger {report.ledger}")
    click.echo(
        f"{report.blocks:,} blocks, {report.transactions:,} transactions, "
        f"{report.postings:,} postings; {signatures}"
    )
    if report.receipts:
        click.echo(f"{report.receipts:,} receipts of clients and of the server are signed")
    if report.damage is not None:
        click.echo(f"DAMAGED: {report.damage.text()}")
        click.echo("nothing after it was checked; the ledger opens for reading only")
        return
    click.echo(f"{_tokens(report.circulating)} tokens in circulation: all balances add up to it")
    click.echo(f"head {report.blocks - 1}:{report.head}")
    click.echo("note the head elsewhere: verify --expect finds a ledger that was rewritten")
    if report.public_key and not report.is_expected_key:
        click.echo(f"key {report.public_key}")
        click.echo("is it the server's? Who forged the ledger has another: verify --public-key")


def _print_statement(made: LedgerStatement) -> None:
    click.echo(f"client {made.client} of ledger {made.ledger}")
    click.echo(
        f"{_tokens(made.spendable)} tokens to spend, {_tokens(made.held)} within the audit delay, "
        f"{_tokens(made.stake)} staked"
    )
    click.echo(
        f"{'block':>7}  {'what':<12}{'run, round':<22}{'spendable':>16}{'held':>16}{'stake':>16}"
    )
    for line in made.lines:
        place = ", ".join(str(part) for part in (line.run, line.round) if part is not None)
        amounts = "".join(
            f"{_tokens(part):>16}" for part in (line.spendable, line.held, line.stake)
        )
        reason = f"  {line.note['reason']}" if "reason" in line.note else ""
        click.echo(f"{line.block:>7}  {line.kind:<12}{place:<22}{amounts}{reason}")


def _tokens(amount: int) -> str:
    """Return micro-tokens as tokens, exactly.

    >>> _tokens(-1_500_000_000), _tokens(1)
    ('-1,500.000000', '0.000001')
    """
    from paceline.federated.ledger import MICRO_TOKENS

    whole, rest = divmod(abs(amount), MICRO_TOKENS)
    return f"{'-' if amount < 0 else ''}{whole:,}.{rest:06d}"
