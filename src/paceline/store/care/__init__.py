"""Verifies and repairs packs: finds damage, and restores it from source, copy or parity."""
