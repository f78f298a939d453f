"""``GroupedExperts``: the experts of one rank, all layers, addressed by physical expert id.

Called by the token router for a rank's own rounds and for those of its peers.
"""

from collections.abc import Sequence
from typing import Any

import torch

from coterie.experts.kernels.base import Kernels
from coterie.experts.rows import Rows


class GroupedExperts:
    """Local experts and a count of the tokens each has computed.

    Args:
        physical_ids: ``[num_local]``, physical expert of each local expert, ascending.
        num_physical: physical experts of all ranks.
        packed_layers: per MoE layer what ``kernels.pack_experts`` returned.
    """

    def __init__(
        self,
        kernels: Kernels,
        physical_ids: Sequence[int],
        num_physical: int,
        packed_layers: Sequence[Any],
    ) -> None:
        assert list(physical_ids) == sorted(set(physical_ids)), physical_ids
        assert all(0 <= p < num_physical for p in physical_ids), (physical_ids, num_physical)
        self.physical_ids = tuple(physical_ids)
        self._kernels = kernels
        self._layers = list(packed_layers)
        self._physical_ids = torch.tensor(self.physical_ids, dtype=torch.int32)
        self._tokens = torch.zeros(len(self.physical_ids), dtype=torch.int64)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_local(self) -> int:
        return len(self.physical_ids)

    @property
    def tokens(self) -> list[int]:
        """Tokens computed so far per local expert, all layers together."""
        return self._tokens.tolist()

    def forward(
        self, layer: int, segments: Sequence[Rows], first: int = 0, last: int | None = None
    ) -> None:
        """Compute local experts ``first..last-1`` for the rows of all segments, in place.

        One pass over the weights, whatever the number of segments; a row's result does not depend
        on the others.

        Args:
            layer: index among the MoE layers.
            segments: their ``out`` becomes the weighted sum of the experts if ``first`` is 0, else
                is added to: calls over consecutive ranges equal one call over all of them, bit
                for bit. Ids that are not local are ignored.
        """
        last = self.num_local if last is None else last
        self._kernels.experts(
            segments, self._physical_ids, self._layers[layer], first, last, self._tokens
        )
