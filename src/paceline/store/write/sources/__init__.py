"""Where samples come from: folders, tar archives, and anything that Python can iterate over.

A source yields batches (`source`) in the order in which a pack stores them, and fills a buffer with
their bytes on request.
"""
