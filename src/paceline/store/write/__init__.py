"""Packs sources of samples: sources, shards, sorted-run files, the journal, the index, append."""
