"""A pack as a torch data set, to use with torch's own DataLoader.

Under fork and under spawn, workers map the same page cache; nothing but the path is pickled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch.utils.data

from paceline.core.errors import UsageError
from paceline.store.in_place.opening import open_pack
from paceline.store.read.pack import Pack

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence


class PackDataset(torch.utils.data.Dataset):  # type: ignore[misc]  # torch is untyped to mypy here
    """Samples of a pack as ``(transform(bytes), label)``, for any `DataLoader`.

    Args:
        pack: an open pack, or the path of one.
        transform: turns a sample's bytes into what the model trains on; None leaves the bytes.
    """

    def __init__(
        self,
        pack: Pack | str | os.PathLike[str],
        transform: Callable[[bytes], Any] | None = None,
    ) -> None:
        self.pack = pack if isinstance(pack, Pack) else open_pack(pack)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.pack)

    def __getitem__(self, sample: int) -> tuple[Any, int]:
        return self._item(self.pack.read(sample), int(self.pack.labels_of([sample])[0]))

    def __getitems__(self, samples: Sequence[int]) -> list[tuple[Any, int]]:
        """Return a whole batch by one call into C++; `DataLoader` prefers this."""
        ids = np.asarray(samples, np.int64)
        buffer, offsets = self.pack.read_batch(ids)
        labels = self.pack.labels_of(ids)
        return [
            self._item(buffer[offsets[k] : offsets[k + 1]].tobytes(), int(labels[k]))
            for k in range(len(ids))
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return which pack this is; the position in the epoch is the sampler's."""
        return {"version": 1, "pack": self.pack.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that `state` is of the same pack.

        Raises:
            UsageError: it is not.
        """
        if dict(state) != self.state_dict():
            raise UsageError(
                "the state is of another pack",
                where=str(self.pack.path),
                why=f"it is {dict(state)}, and here it is {self.state_dict()}",
                fix="Open the pack that it was saved with",
            )

    def _item(self, body: bytes, label: int) -> tuple[Any, int]:
        return (body if self.transform is None else self.transform(body)), label
