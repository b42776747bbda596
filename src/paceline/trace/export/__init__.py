"""Writes a run's traces in the formats of other tools.

    otf2             OTF2 archives: Vampir, Scalasca, Cube, otf2-print
    chrome           Chrome's JSON: Perfetto
    table            Parquet and CSV, a row per event
    chakra           Chakra execution traces: simulators of networks

Each writer goes through the ranks once, in order, and keeps the events of one of them at a time.
Import the writer that you need: OTF2 and Parquet need packages that Paceline does not.
"""
