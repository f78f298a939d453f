"""A step's plan turned into tensors, fresh for every step: nothing persists between steps."""

import numpy as np
import torch

from coterie.attention.metadata import ForwardBatch
from coterie.runtime.rank.scheduler import SchedulerOutput


def make_forward_batch(output: SchedulerOutput, block_size: int) -> ForwardBatch:
    """The rows of ``output``, request after request."""
    num_tokens = output.num_tokens
    num_reqs = len(output.requests)
    input_ids = np.empty(num_tokens, dtype=np.int64)
    positions = np.empty(num_tokens, dtype=np.int64)
    slot_mapping = np.empty(num_tokens, dtype=np.int64)
    query_start_loc = np.zeros(num_reqs + 1, dtype=np.int32)
    seq_lens = np.empty(num_reqs, dtype=np.int32)
    width = max(len(entry.request.blocks) for entry in output.requests)
    block_table = np.zeros((num_reqs, width), dtype=np.int32)
    logits_rows = []
    first = 0
    for index, entry in enumerate(output.requests):
        request = entry.request
        start = entry.num_computed_tokens
        end = start + entry.num_scheduled_tokens
        last = first + entry.num_scheduled_tokens
        blocks = np.asarray(request.blocks, dtype=np.int64)
        block_table[index, : len(blocks)] = blocks
        input_ids[first:last] = request.token_ids[start:end]
        rows = np.arange(start, end)
        positions[first:last] = rows
        slot_mapping[first:last] = blocks[rows // block_size] * block_size + rows % block_size
        query_start_loc[index + 1] = last
        seq_lens[index] = end
        if entry.sampled:
            logits_rows.append(last - 1)
        first = last
    return ForwardBatch(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slot_mapping),
        query_start_loc=torch.from_numpy(query_start_loc),
        seq_lens=torch.from_numpy(seq_lens),
        block_table=torch.from_numpy(block_table),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
        big=output.big,
    )
