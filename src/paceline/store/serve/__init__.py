"""Spreads a pack over the local storage of nodes, and reads it from there.

Five modules decide and do nothing else, with time as an argument: `placement` (which nodes hold
which shard), `membership` (who is there, and what a node has to copy), `staging` (in which order
and how fast), `cache` (what to evict and prefetch when the future is known), `fit` (how many nodes
a pack needs). The others do what these say:

    node            the server of a node           remote_pack     what a program reads from
     |- shard_copier  copies under way              |- batch          one batch on its way
     '- local_shards  a folder of shards            |- cached_shards  a folder of others' shards
                                                    '- known_nodes    who holds what
    links, card     how bytes and news travel      status          asks all nodes

How to use it: docs/guides/store-nodes.md.
"""
