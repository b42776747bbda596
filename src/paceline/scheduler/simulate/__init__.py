"""Simulates a queue: the policy's own code, a world with rates of its own, and a virtual clock."""
