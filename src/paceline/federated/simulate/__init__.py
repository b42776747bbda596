"""Simulated clients: devices, links, data, training, on a virtual clock."""
