"""The folder of a run: the files that `paceline run` writes and other subcommands read.

Reading a run does not need the launcher: result, configuration, versions and estimate are defined
in this package, below `launch`, which writes them.
"""
