"""What remedies against load imbalance are worth at other numbers of ranks, from a measured run.

`parts` takes from a trace how long each rank computed in each step, and what of it a remedy can
change; `remedies` changes it; `maxima` gives the slowest of many ranks; `forecast` puts them
together, with a band.
"""

from paceline.perf.imbalance.forecast import (
    REMEDIES,
    ForecastSettings,
    RemedyForecast,
    forecast_remedies,
)
from paceline.perf.imbalance.parts import BusyParts, busy_parts

__all__ = [
    "REMEDIES",
    "BusyParts",
    "ForecastSettings",
    "RemedyForecast",
    "busy_parts",
    "forecast_remedies",
]
