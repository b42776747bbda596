"""Starts Python programs as forks of a process that has imported what they need.

`import torch` and what optimizers import take 2.4 s of CPU for each rank, more than most of what is
tested. Here each test process has servers, one for each set of modules; a server has imported them
and forks a child for each program that is started::

    test process            server (one thread)              child
      Popen(command) ------> fork ---------------------> cwd, variables, descriptors
                     <--------------------------------- its process id
      poll, wait     ------> waitpid                      runs the program as __main__

What a child starts by `subprocess.Popen` is forked from it in the same way: ranks of a launcher,
which therefore keeps to one thread.

A fork is what a start would have made, but for these: its modules are loaded already, C libraries
have read their variables before, and /proc/PID/cmdline and environ are the server's (`marked`
finds it all the same). A program is started, not forked, where that could matter: if its variables
differ in what libraries read (`READ_AT_START`, but for the number of threads, which torch lets a
child set), if the interpreter gets options that cannot be applied afterwards, or if the process
that would be forked has threads that Python does not know, such as OpenMP's, whose locks the child
would inherit. Tests of a start itself ask for one: `fresh`.
"""

from support.forking.popen import PLAIN, TORCH, Popen, leaked_variables, run
from support.forking.processes import MARK, marked

__all__ = ["MARK", "PLAIN", "TORCH", "Popen", "leaked_variables", "marked", "run"]
