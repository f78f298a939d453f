"""``GroupedExperts``: the experts of one rank, all layers, addressed by physical expert id.

Called by the token router for a rank's own rounds and for those of its peers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from coterie.experts.kernels.base import Kernels


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
        # One more entry than experts: id -1 reads the last one, which says "not here".
        self._local_of = np.full(num_physical + 1, -1, dtype=np.int32)
        self._local_of[list(physical_ids)] = np.arange(len(physical_ids), dtype=np.int32)
        self._tokens = np.zeros(len(physical_ids), dtype=np.int64)

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
        self,
        layer: int,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        """Add the weighted outputs of local experts ``first..last-1`` to ``out``.

        Args:
            layer: index among the MoE layers.
            hidden_states: ``[num_tokens, hidden]`` model dtype.
            topk_ids: ``[num_tokens, top_k]`` int32 physical experts, -1 = none; ids that are not
                local are ignored. A token names an expert once.
            topk_weights: ``[num_tokens, top_k]`` float32.
            out: ``[num_tokens, hidden]`` float32. Calls over consecutive ranges of experts equal
                one call over all of them, bit for bit.
        """
        last = self.num_local if last is None else last
        local_ids = self._local_of[topk_ids.numpy()]
        counts = np.bincount(local_ids.ravel() + 1, minlength=self.num_local + 1)[1:]
        if not counts[first:last].any():
            return
        self._kernels.experts(
            hidden_states,
            torch.from_numpy(local_ids),
            topk_weights,
            self._layers[layer],
            out,
            first,
            last,
        )
        self._tokens[first:last] += counts[first:last]
