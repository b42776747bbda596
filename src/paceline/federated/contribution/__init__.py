"""What each client's update is worth to the model, whatever the client says of itself."""

from paceline.federated.contribution.accuracy_records import AccuracyRecords
from paceline.federated.contribution.options import ContributionOptions
from paceline.federated.contribution.scorer import ClientScore, Contribution, RoundScores
from paceline.federated.contribution.shapley import (
    CoalitionGame,
    ShapleyOptions,
    exact_shapley,
    gtg_shapley,
)

__all__ = [
    "AccuracyRecords",
    "ClientScore",
    "CoalitionGame",
    "Contribution",
    "ContributionOptions",
    "RoundScores",
    "ShapleyOptions",
    "exact_shapley",
    "gtg_shapley",
]
