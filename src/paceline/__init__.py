"""Paceline: measure, predict and fix what holds distributed deep learning back."""

from paceline.core.step_mark import step

__version__ = "0.1.0"
__all__ = ["__version__", "step"]
