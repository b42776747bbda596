"""Policies: each module holds one, with its formula and source; `POLICIES` names them all."""

from paceline.scheduler.policies.registry import POLICIES

__all__ = ["POLICIES"]
