"""What a run did: recorded while it runs, joined on one clock, and turned into answers.

Four sub-packages and an export, with imports in one direction (an import contract checks it):

    analysis     chrome      Analysis: waits, phases, skew, stragglers, traffic | Chrome's JSON
        '----------'
             merge           the ranks' files matched, on the run's one clock: Trace
               |
             format          the event schema; one rank's file
               |
           collectors        hooks in a framework, which record events; loaded in a rank's process

Import the module that you need: the recording side must not load what only analyses need.
"""
