"""Federations: whom to ask, what came back, what it was worth, what is paid.

    clients (measured profiles) -> selection -> rounds -> aggregation -> monitor
                                                  |
                                                  +-> contribution -> ledger

All of this is pure: a virtual clock, the embedded engine and Flower drive the same objects.
"""
