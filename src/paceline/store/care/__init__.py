"""Looks after packs: finds damage, and repairs it from what is redundant."""
