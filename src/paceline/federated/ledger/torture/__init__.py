"""Kills the writer of a ledger again and again, and compares what is left with a model.

A stream of random operations is a function of a seed: deposits, rounds, releases, slashing, runs
that end, operations that must be refused, operations that were done before. A process writes them
in blocks, and is killed with SIGKILL at random moments. The next one begins some blocks earlier
than the last acknowledged one, as a caller would that does not know what was committed. In the end
the ledger must verify, and must come to what a model comes to that did each operation once:

    conserved       balances sum to zero, after every kill
    never negative  also in the model, which knows no SQLite
    exactly once    as many transactions, and equal balances and held payments

A killed process loses nothing that it had given to the operating system: this shows atomicity and
idempotency. That commits survive a power failure rests on SQLite's fsync (synchronous = FULL).
"""
