"""The entry point by which torch, at the end of its import, finds Paceline's backend.

A module of its own, beside the package, with no import that could fail: torch refuses to be
imported where such an entry point raises, and an environment whose Paceline is half installed must
still train. It is a file of the environment even where the package is a link to a clone, which may
be gone.
"""


def register() -> None:
    """Register the backend ``paceline``; where Paceline cannot be loaded, warn and go on."""
    try:
        from paceline.collectives.registration import register

        register()
    except Exception as problem:  # noqa: BLE001  # whatever it is, torch is imported
        _warn(f"{type(problem).__name__}: {problem}")


def _warn(problem: str) -> None:
    import warnings

    try:
        warnings.warn(
            f"Paceline is not installed correctly ({problem}): torch has no backend 'paceline'. "
            "Install Paceline again, or remove it: pip uninstall paceline",
            RuntimeWarning,
            stacklevel=2,
        )
    except RuntimeWarning:  # python -W error
        return
