"""Runs a script as one rank of a process group, and ends its process at once.

    rank_process.py SCRIPT ARGS...

A thread of gloo that still frees the tensors of the last collective takes the GIL; while the
interpreter ends, this aborts the process, rarely. A test's rank has nothing to tidy up then.
"""

import os
import runpy
import sys
from pathlib import Path

script = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(script).parent)
runpy.run_path(script, run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
