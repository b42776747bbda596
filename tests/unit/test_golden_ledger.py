"""The ledger's format is what it was: tables, bodies and hashes of a ledger that users keep.

``python tests/unit/test_golden_ledger.py`` writes the golden file if it is not there.
"""

import tempfile
from pathlib import Path

from support.ledgers import audited

from paceline.federated.ledger import SigningKey, schema

GOLDEN = Path(__file__).parents[1] / "golden"
BLOCKS = GOLDEN / "ledger-1.jsonl"
SCHEMA = GOLDEN / "ledger-1.sql"


def blocks(folder):
    with audited(folder / "ledger.db", key=SigningKey.from_seed(b"g" * 32)) as ledger:
        return "".join(f"{line}\n" for line in ledger.json_lines())


def tables():
    return "".join(f"{statement};\n" for statement in schema.statements())


def test_blocks_are_hashed_and_signed_as_before(tmp_path):
    assert blocks(tmp_path) == BLOCKS.read_text()


def test_tables_and_triggers_are_as_before():
    assert tables() == SCHEMA.read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for path, text in ((BLOCKS, blocks(Path(made))), (SCHEMA, tables())):
            if not path.exists():
                path.write_text(text)
