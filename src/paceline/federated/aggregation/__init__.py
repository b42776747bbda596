"""Makes one change of the model of the updates of many clients.

    updates --weights--> weighted_sum ---+
                         robust rule  ---+--> change --server optimizer--> model
                         private mean ---+
                         secure sum   ---+

Vectors are flat, float32, one per client, and are read in chunks of coordinates: no rule stacks the
updates of a round, and what it holds besides them does not grow with the number of clients.
"""

from paceline.federated.aggregation.chunks import weighted_sum
from paceline.federated.aggregation.clipping import clip
from paceline.federated.aggregation.privacy import GaussianMechanism, epsilon
from paceline.federated.aggregation.robust import (
    coordinate_median,
    krum,
    multi_krum,
    trimmed_mean,
)
from paceline.federated.aggregation.secure import MaskedSum, SecureGroup
from paceline.federated.aggregation.server import ServerAdam, ServerSgd, ServerYogi
from paceline.federated.aggregation.weights import (
    equal_shares,
    nova_weights,
    sample_shares,
    staleness_weights,
)

__all__ = [
    "GaussianMechanism",
    "MaskedSum",
    "SecureGroup",
    "ServerAdam",
    "ServerSgd",
    "ServerYogi",
    "clip",
    "coordinate_median",
    "epsilon",
    "equal_shares",
    "krum",
    "multi_krum",
    "nova_weights",
    "sample_shares",
    "staleness_weights",
    "trimmed_mean",
    "weighted_sum",
]
