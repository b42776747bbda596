"""What an unchanged program does, turned into events; one file per framework.

The only place in `trace` that may import a framework. `launch` loads a collector by name in the
process that runs the script, so that analyses never do.
"""
