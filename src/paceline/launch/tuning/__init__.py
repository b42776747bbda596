"""Tries two values of a setting in a running job, by turns, and keeps the better (`--tune`).

`paired_test` decides, `schedule` says which value each step has; both are pure. `settings` are what
can be switched, and `session` does it in each rank.
"""
