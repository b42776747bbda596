"""Records a run, merges its ranks' traces on one clock, and analyses them.

Six sub-packages, with imports in one direction (an import contract checks it):

    efficiency               why ranks wait, and what would make a step shorter; two runs compared
        |
    analysis     export      Analysis: waits, phases, skew, stragglers, traffic | other formats
        '----------'
             merge           the ranks' files matched, on the run's one clock: Trace
               |
             format          the event schema; one rank's file
               |
           collectors        hooks in a framework, which record events; loaded in a rank's process

Import the module that you need: recording must not load modules that only analyses need.
"""
