"""Reports a run in words, tables and one HTML page, and compares it with its prediction.

`model.gather` finds all numbers once; `words` says them in a sentence, `terminal` in tables, `page`
on one page that needs nothing else. They render the same `Report`, so they cannot disagree. `queue`
shows policies of the scheduler in the same two ways.
"""
