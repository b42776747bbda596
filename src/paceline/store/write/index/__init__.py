"""Builds the index of a pack: columns of samples, sorted on disk, merged into sections.

Columns stream through files, so memory is bounded whatever the number of samples is.
"""
