"""Feeds training from a pack: sample order, share of a rank, batches made ahead of the loop."""
