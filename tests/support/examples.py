"""How many examples Hypothesis draws: $EXAMPLES is quick (the default), thorough or campaign."""

import os

from hypothesis import HealthCheck, settings

PROFILES = {"quick": 25, "thorough": 100, "campaign": 1000}
PROFILE = os.environ.get("EXAMPLES", "quick")


def load() -> None:
    """Set what all property tests have in common.

    Hypothesis fails an example that takes 200 ms, and a test whose data are slow to generate. Both
    are timed assertions: on a loaded machine they fail at random.
    """
    for name, count in PROFILES.items():
        settings.register_profile(
            name, max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
    settings.load_profile(PROFILE)


def examples(thorough: int) -> int:
    """Return the number of examples of a test whose thorough run has another than 100."""
    if PROFILE == "quick":
        return max(1, min(thorough * PROFILES["quick"] // PROFILES["thorough"], PROFILES["quick"]))
    return thorough * PROFILES[PROFILE] // PROFILES["thorough"]
