"""Secure aggregation: the server learns the sum of a group, and no update of its members.

Each pair of a group's members shares a seed. Both expand it to a mask as long as the model; the
first adds it, the second subtracts it, and in the sum of the group all masks cancel:

    member i sends  y_i = q(x_i) + sum over j > i of m_ij - sum over j < i of m_ij   (mod 2^32)
    server          sum of y_i = sum of q(x_i)

q turns a float into a fixed-point integer, so that masks cancel to the bit and a masked value is
uniform whatever the update is. The seed of a pair comes from a key agreement between the two
(X25519 with the keys of their identities); the server relays public keys and learns no seed.

A member that drops out leaves its masks in the sum. The others then disclose the seeds that they
shared with it, and the server subtracts those masks.

Limits, by design of the simple protocol:
  * The server must follow it. A server that calls a member lost and receives its update all the
    same can unmask it; that needs the second mask and secret sharing of the source. `MaskedSum`
    therefore takes no update of a member once it was given up, nor gives up one whose update came.
  * Members who collude with the server can remove their own masks; with n - 1 of them, all.
  * Nobody sees an update: checks of NaN, norm, novelty and direction cannot be made. Members clip
    themselves to `bound`, and a liar can send any value within it.
  * Scores are of groups: members share their group's score equally, so that a free rider in a group
    of n is paid by the others. Draw groups anew each round; over many rounds the means separate,
    slowly.

Source: K. Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning,
CCS 2017, section 4 (the masks of section 4.0.1, without the double masks of 4.0.2).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.federated.aggregation.clipping import clip

if TYPE_CHECKING:
    from collections.abc import Mapping

LEAST_MEMBERS = 5
"""Of a group: in the sum of fewer, a member can guess too much of the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SecureGroup:
    """What the members of a group agree on for a round.

    Attributes:
        members: ids, each once; at least LEAST_MEMBERS.
        round: number that no other round of these members has: masks must not be used twice.
        parameters: of the model.
        bound: of the norm of an update; longer ones are clipped by the member.
    """

    members: tuple[str, ...]
    round: int
    parameters: int
    bound: float

    def __post_init__(self) -> None:
        if len(set(self.members)) != len(self.members) or len(self.members) < LEAST_MEMBERS:
            raise UsageError(
                f"a group of {len(self.members)} members cannot be aggregated securely",
                where="secure aggregation",
                why=f"it takes {LEAST_MEMBERS} or more, each of them once",
                fix="Make fewer, larger groups",
            )
        if not self.bound > 0 or self.parameters < 1:
            raise UsageError(
                f"bound {self.bound:g} and {self.parameters} parameters are not possible",
                where="secure aggregation",
                fix="Give a bound above 0, and the length of the model's vector",
            )

    @property
    def step(self) -> float:
        """Value of one unit of the fixed-point numbers: the sum of all members cannot overflow."""
        return self.bound * len(self.members) / 2**30

    def mask(self, member: str, delta: np.ndarray, seeds: Mapping[str, bytes]) -> np.ndarray:
        """Return what a member sends; uint32, shape (parameters,). Runs at the member.

        Args:
            member: its id.
            delta: its update; float32, finite.
            seeds: secret that it shares with each other member; 16 bytes or more.

        Raises:
            UsageError: a seed is missing or short, or the update does not fit.
        """
        self._check_member(member)
        if delta.shape != (self.parameters,):
            raise UsageError(
                f"the update has shape {delta.shape}, the model {self.parameters} parameters",
                where=f"secure aggregation, member {member}",
                fix="Train the model of this federation",
            )
        scaled = np.rint(clip(delta, self.bound) / self.step)
        masked = scaled.astype(np.int64).astype(np.uint32)
        for other in self.members:
            if other != member:
                self.apply_mask(masked, member, other, seeds, adds=member < other)
        return masked

    def apply_mask(
        self,
        values: np.ndarray,
        member: str,
        other: str,
        seeds: Mapping[str, bytes],
        *,
        adds: bool,
    ) -> None:
        """Add the mask of a pair to the values, or subtract it, in place."""
        seed = seeds.get(other, b"")
        if len(seed) < 16:
            raise UsageError(
                f"member {member} has no seed of 16 bytes or more with {other}",
                where="secure aggregation",
                fix="Agree on a secret with each member of the group first",
            )
        first, second = sorted((member, other))
        text = "\0".join(("paceline mask", str(self.round), first, second)).encode()
        stream = hashlib.shake_256(len(seed).to_bytes(4, "big") + seed + text)
        mask = np.frombuffer(stream.digest(4 * self.parameters), "<u4")
        if adds:
            np.add(values, mask, out=values)
        else:
            np.subtract(values, mask, out=values)

    def _check_member(self, member: str) -> None:
        if member not in self.members:
            raise UsageError(
                f"{member} is not in the group",
                where="secure aggregation",
                fix=f"The members are {', '.join(self.members[:8])}",
            )


class MaskedSum:
    """The server's side of a group: adds what arrives, repairs drop-outs, returns the mean.

    It holds one vector, however many members there are.
    """

    def __init__(self, group: SecureGroup) -> None:
        self.group = group
        self._sum = np.zeros(group.parameters, np.uint32)
        self._arrived: set[str] = set()
        self._lost: set[str] = set()
        self._repaired: set[tuple[str, str]] = set()

    def add(self, member: str, masked: np.ndarray) -> None:
        """Add what a member sent.

        Raises:
            UsageError: it is not of the group, came before, was given up, or does not fit.
        """
        self._check(member, self._arrived | self._lost, "has answered, or was given up, before")
        if masked.shape != self._sum.shape or masked.dtype != np.uint32:
            raise UsageError(
                f"a masked update must be uint32 of shape {self._sum.shape}",
                where=f"secure aggregation, member {member}",
                why=f"it is {masked.dtype} of shape {masked.shape}",
                fix="Send what SecureGroup.mask returns",
            )
        np.add(self._sum, masked, out=self._sum)
        self._arrived.add(member)

    def give_up(self, member: str) -> None:
        """Note that a member dropped out; its update is not taken any more.

        Raises:
            UsageError: its update has arrived: unmasking it is what must not happen.
        """
        self._check(member, self._arrived, "has answered, and cannot be given up")
        self._lost.add(member)

    def disclose(self, member: str, lost: str, seed: bytes) -> None:
        """Remove the mask that a member has with one that dropped out.

        Raises:
            UsageError: the member did not answer, the other is not lost, or it came before.
        """
        if member not in self._arrived or lost not in self._lost:
            raise UsageError(
                f"the seed of {member} and {lost} must not be disclosed",
                where="secure aggregation",
                why="only a member that answered discloses, and only of one that was given up",
                fix="Give up members that do not answer first",
            )
        self._check_once((member, lost))
        self.group.apply_mask(self._sum, member, lost, {lost: seed}, adds=member > lost)
        self._repaired.add((member, lost))

    def mean(self) -> np.ndarray:
        """Return the mean update of the members that answered; float32, shape (parameters,).

        Raises:
            UsageError: a member is missing, a mask is left, or too few have answered.
        """
        missing = set(self.group.members) - self._arrived - self._lost
        left = {(m, gone) for m in self._arrived for gone in self._lost} - self._repaired
        if missing or left or len(self._arrived) < LEAST_MEMBERS:
            raise UsageError(
                f"the sum of {len(self._arrived)} members cannot be opened",
                where=f"secure aggregation, round {self.group.round}",
                why=f"missing: {sorted(missing)}; seeds to disclose: {sorted(left)[:5]}; "
                f"{LEAST_MEMBERS} members must have answered",
                fix="Give up who is missing, have the others disclose their seeds with it, or "
                "throw the group's round away",
            )
        # Two's complement: the sum of the fixed-point numbers is within 2^30 of 0.
        total = self._sum.view(np.int32)
        return (total * (self.group.step / len(self._arrived))).astype(np.float32)

    def shares(self, score: float) -> dict[str, float]:
        """Return the score of the group, divided equally among the members that answered."""
        return {member: score / len(self._arrived) for member in sorted(self._arrived)}

    def _check(self, member: str, taken: set[str], why: str) -> None:
        if member not in self.group.members or member in taken:
            raise UsageError(
                f"member {member} is not expected",
                where=f"secure aggregation, round {self.group.round}",
                why=why if member in taken else "it is not in the group",
                fix="Take one answer of each member, and none of those that were given up",
            )

    def _check_once(self, pair: tuple[str, str]) -> None:
        if pair in self._repaired:
            raise UsageError(
                f"the seed of {pair[0]} and {pair[1]} was disclosed before",
                where=f"secure aggregation, round {self.group.round}",
                fix="Remove each mask once",
            )
