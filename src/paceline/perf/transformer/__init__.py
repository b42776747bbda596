"""Predicts the training of transformers on machines of any size, without torch or a device.

`Architecture` says what is trained, a Machine on what, a Plan how; `estimate_transformer` returns
the Estimate. `fit_efficiency` corrects a machine by measured steps.
"""

from paceline.perf.transformer.architecture import Architecture
from paceline.perf.transformer.configurations import read_architecture
from paceline.perf.transformer.fitting import TimedStep, fit_efficiency, with_efficiency
from paceline.perf.transformer.prediction import Risks, estimate_transformer
from paceline.perf.transformer.supply import SampleCost

__all__ = [
    "Architecture",
    "Risks",
    "SampleCost",
    "TimedStep",
    "estimate_transformer",
    "fit_efficiency",
    "read_architecture",
    "with_efficiency",
]
