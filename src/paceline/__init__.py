"""Paceline: measure, predict and fix what holds distributed deep learning back."""

__version__ = "0.1.0"
__all__ = ["__version__"]
