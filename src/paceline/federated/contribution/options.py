"""What the gate lets pass, and how fast reputations change."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.errors import UsageError
from paceline.federated.contribution.shapley import ShapleyOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class ContributionOptions:
    """Options of a Contribution; all of them change results.

    Attributes:
        sketch_size: buckets of a sketch; cosines are known to 1 / sqrt(sketch_size).
        window: rounds whose sketches are kept.
        remembered_clients: of which the last sketches are kept beyond the window; the one that was
            not seen for longest is forgotten first.
        clip_ratio: norm over the round's median above which an update is clipped.
        refuse_ratio: and above which it is refused.
        refuse_ratio_blind: the same where no utility can judge what a larger norm is good for.
        replay_share: of an update's norm that earlier global steps explain, from which on it is
            refused.
        duplicate_cosine: of what two updates have besides the round's common direction, from which
            on they are one.
        common_share: of the round's clients, the most alike ones, that do not vouch for a client:
            as many may collude.
        noise_deviations: similarity to any earlier update, in standard deviations of that of noise,
            up to which an update is noise.
        memory: weight of a new outcome in the reputation.
        newcomer: reputation of a client that is not known.
        shapley: of the values where the server has a utility.
    """

    sketch_size: int = 4096
    window: int = 16
    remembered_clients: int = 2000
    clip_ratio: float = 2.0
    refuse_ratio: float = 5.0
    refuse_ratio_blind: float = 2.5
    replay_share: float = 0.9
    duplicate_cosine: float = 0.9
    common_share: float = 0.3
    noise_deviations: float = 5.0
    memory: float = 0.25
    newcomer: float = 0.5
    shapley: ShapleyOptions = field(default_factory=ShapleyOptions)

    def __post_init__(self) -> None:
        shares = self.replay_share, self.duplicate_cosine, self.memory, self.newcomer
        if not all(0 < share <= 1 for share in shares) or not 0 <= self.common_share < 1:
            raise UsageError(
                "shares of the contribution gate must be above 0 and at most 1",
                where="contribution",
                why=f"they are {shares} and {self.common_share}",
                fix="Give shares in (0, 1], and a common_share in [0, 1)",
            )
        sizes = self.window, self.sketch_size, self.remembered_clients
        if min(sizes) < 1 or not 1 <= self.clip_ratio <= self.refuse_ratio:
            raise UsageError(
                "sizes must be at least 1, and 1 <= clip_ratio <= refuse_ratio",
                where="contribution",
                why=f"they are {sizes}, {self.clip_ratio} and {self.refuse_ratio}",
                fix="Leave out the options that need not differ from their defaults",
            )
