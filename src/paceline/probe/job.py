"""The place of this process in a job: what a measurement between ranks of a job starts from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlace:
    """This process's place in a job.

    Attributes:
        rank: of this process.
        ranks: of the job, at least 2.
        init_method: how the ranks meet, as `torch.distributed.init_process_group` has it.
    """

    rank: int
    ranks: int
    init_method: str
