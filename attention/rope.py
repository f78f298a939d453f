"""Rotary position embedding: the table of cosines and sines that attention backends read.

The rotation itself (Hugging Face's rotate_half convention) is in the backends, fused with the write
of K and V to the cache.
"""

import math

import torch

from coterie.attention.models.hf_config import RopeScaling


def cos_sin_table(
    max_len: int, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> torch.Tensor:
    """Table for positions ``0..max_len-1``.

    Returns:
        ``[max_len, head_dim]`` float32: cosines of the ``head_dim / 2`` frequencies, then sines.
    """
    inv_freq = inverse_frequencies(head_dim, theta, scaling)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """``[head_dim / 2]`` float32."""
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return inv_freq
    if scaling.rope_type == "linear":
        return inv_freq / scaling.factor
    return _llama3_frequencies(inv_freq, scaling)


def _llama3_frequencies(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, blend between.

    Source: Llama 3.1 as in transformers, modeling_rope_utils._compute_llama3_parameters.
    """
    old_len = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    smooth = ((old_len / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
