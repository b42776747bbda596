"""Records a run, merges its ranks' traces on one clock, and analyses them.

Five sub-packages and an export, with imports in one direction (an import contract checks it):

    efficiency               why ranks wait, and what would make a step shorter; two runs compared
        |
    analysis     chrome      Analysis: waits, phases, skew, stragglers, traffic | Chrome's JSON
        '----------'
             merge           the ranks' files matched, on the run's one clock: Trace
               |
             format          the event schema; one rank's file
               |
           collectors        hooks in a framework, which record events; loaded in a rank's process

Import the module that you need: recording must not load modules that only analyses need.
"""
