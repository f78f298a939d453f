"""Addresses of tensors, and memory that kernels reuse between calls."""

import torch


def address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Address of the first element of a contiguous CPU tensor of ``dtype``."""
    assert tensor.dtype is dtype, f"expected {dtype}, got {tensor.dtype}"
    assert tensor.is_contiguous(), "not contiguous"
    assert tensor.device.type == "cpu", f"expected a CPU tensor, got {tensor.device}"
    return tensor.data_ptr()


class Scratch:
    """A buffer that grows to the largest size ever asked for; one per compute thread."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> int:
        """Address of at least ``num_bytes``, valid until the next call; content is arbitrary."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8)
        return self._buffer.data_ptr()
