"""Writes a run's traces in the formats of other tools.

    otf2             OTF2 archives: Vampir, Scalasca, Cube, otf2-print
    chrome           Chrome's JSON: Perfetto
    table            Parquet and CSV, a row per event
    chakra           Chakra execution traces: simulators of networks

Each writer goes through the ranks in order and keeps what it makes of one of them at a time. OTF2
and tables need no more of the run than that (`SpooledSource`). OTF2's library and pyarrow are
loaded when they are used, and only then needed.
"""

from paceline.trace.export.chakra import write_chakra
from paceline.trace.export.chrome import write_chrome
from paceline.trace.export.otf2 import write_otf2
from paceline.trace.export.source import ExportSummary, SpooledSource, TraceSource
from paceline.trace.export.table import write_csv, write_parquet

__all__ = [
    "ExportSummary",
    "SpooledSource",
    "TraceSource",
    "write_chakra",
    "write_chrome",
    "write_csv",
    "write_otf2",
    "write_parquet",
]
