"""Finds the rank for which all others wait in vain, and says what it does there."""
