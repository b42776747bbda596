"""Collectives that know which ranks share a host."""
