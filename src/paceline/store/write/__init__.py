"""Packs a source of samples: `pack` and `append`, through one pipeline.

`sources` yields batches; `pipeline` encodes, places and writes them, and notes in the journal what
a later packing resumes from; `index` builds the index at the end.
"""
