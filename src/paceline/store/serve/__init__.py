"""Spreads a pack over the local storage of nodes, and reads it from there.

Four modules decide and do nothing else, with time as an argument: `placement` (which nodes hold
which shard), `membership` (who is there, and what a node has to copy), `staging` (in which order
and how fast), `cache` (what to evict and prefetch when the future is known). `links` carries bytes
between nodes, `node` is the server, `remote_pack` is what a program reads from. How to use it:
docs/guides/store-nodes.md.
"""
