"""The folder of a run: what `paceline run` leaves and every later verb reads.

Whoever reads a run needs no launcher: result, configuration, versions and estimate are defined
in this package, below `launch`, which writes them.
"""
