"""Builds the decoder and the local experts of one rank from a checkpoint.

Each function reads only what its rank holds: a rank without attention never reads the decoder, and
no rank reads experts of another seat. Called by the rank while it is warming.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from coterie.attention.attention import Attention
from coterie.attention.backend import AttentionBackend
from coterie.attention.decoder import Decoder, DecoderLayer
from coterie.attention.embedding import Embedding, LMHead
from coterie.attention.kv_cache import PagedKVCache
from coterie.attention.models.checkpoint import WeightSource
from coterie.attention.models.config import ModelConfig
from coterie.attention.models.recipe import ExpertNames, WeightNames
from coterie.attention.models.registry import recipe_of
from coterie.attention.norm import RMSNorm
from coterie.attention.rope import cos_sin_table
from coterie.experts.config import MoEConfig
from coterie.experts.dense_mlp import DenseMLP
from coterie.experts.grouped import GroupedExperts
from coterie.experts.kernels.base import Kernels
from coterie.experts.placement import ExpertPlacement
from coterie.router.gate import TopKGate
from coterie.router.moe_layer import MoELayer
from coterie.router.token_router import TokenRouter

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``; stages are "decoder" and "experts", counted in layers."""


def load_decoder(
    config: ModelConfig,
    checkpoint: WeightSource,
    kernels: Kernels,
    attention_backend: AttentionBackend,
    kv_cache: PagedKVCache,
    router: TokenRouter,
    dtype: torch.dtype,
    progress: Progress | None = None,
    max_model_len: int | None = None,
) -> Decoder:
    """Everything of an attention rank except its experts.

    Args:
        dtype: of weights: bfloat16 or float32; norms are float32 always.
        max_model_len: longest context; default the model's own limit.

    Raises:
        CheckpointError: a tensor is missing or unreadable.
    """
    builder = _DecoderBuilder(
        config=config,
        checkpoint=checkpoint,
        kernels=kernels,
        backend=attention_backend,
        kv_cache=kv_cache,
        router=router,
        dtype=dtype,
        names=recipe_of(config.family).names,
        cos_sin=cos_sin_table(
            max_model_len or config.max_position_embeddings,
            config.head_dim,
            config.rope_theta,
            config.rope_scaling,
        ),
    )
    layers = []
    for index in range(config.num_layers):
        layers.append(builder.layer(index))
        if progress is not None:
            progress("decoder", index + 1, config.num_layers)
    return builder.finish(layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class _DecoderBuilder:
    """Holds what all layers share while they are read one by one."""

    config: ModelConfig
    checkpoint: WeightSource
    kernels: Kernels
    backend: AttentionBackend
    kv_cache: PagedKVCache
    router: TokenRouter
    dtype: torch.dtype
    names: WeightNames
    cos_sin: torch.Tensor

    def layer(self, index: int) -> DecoderLayer:
        moe_layers = self.config.moe_layers
        moe_index = moe_layers.index(index) if index in moe_layers else None
        return DecoderLayer(
            input_norm=self._norm(self.names.input_norm, index),
            attention=self._attention(index),
            post_attention_norm=self._norm(self.names.post_attention_norm, index),
            mlp=self._dense(index) if moe_index is None else self._moe(index, moe_index),
            router_layer=moe_index if moe_layers else index,
        )

    def finish(self, layers: list[DecoderLayer]) -> Decoder:
        embed = self.checkpoint.read(self.names.embed_tokens, self.dtype)
        head = embed
        if not self.config.tie_word_embeddings:
            head = self.checkpoint.read(self.names.lm_head, self.dtype)
        return Decoder(
            config=self.config,
            embedding=Embedding(embed, self.config.embedding_multiplier),
            layers=layers,
            norm=RMSNorm(self.kernels, self._vector(self.names.norm), self.config.rms_norm_eps),
            lm_head=LMHead(self.kernels, self.kernels.pack_linear(head), self.config.logits_scale),
            router=self.router,
        )

    def _attention(self, index: int) -> Attention:
        names, with_bias = self.names, self.config.attention_bias
        qk_norm = self.config.qk_norm
        return Attention(
            config=self.config,
            kernels=self.kernels,
            backend=self.backend,
            kv=self.kv_cache.layer(index),
            cos_sin=self.cos_sin,
            qkv=self._linear((names.q_proj, names.k_proj, names.v_proj), index, with_bias),
            o_proj=self._linear((names.o_proj,), index, with_bias),
            q_norm=self._vector(_weight(names.q_norm, index)) if qk_norm else None,
            k_norm=self._vector(_weight(names.k_norm, index)) if qk_norm else None,
        )

    def _dense(self, index: int) -> DenseMLP:
        gate_up, down = (self.names.gate_proj, self.names.up_proj), (self.names.down_proj,)
        parts = [self._stacked(part, index, "weight", self.dtype) for part in (gate_up, down)]
        if self.config.mlp_bias:
            parts += [self._stacked(part, index, "bias", torch.float32) for part in (gate_up, down)]
        return DenseMLP(self.kernels, *parts)

    def _moe(self, index: int, moe_index: int) -> MoELayer:
        moe, experts = self.config.moe, self.names.experts
        assert moe is not None, "moe_layers without moe"
        assert experts is not None, "a recipe with moe_layers but no expert names"
        router_weight = self.checkpoint.read(experts.router.format(layer=index), self.dtype)
        gate = TopKGate(self.kernels, self.kernels.pack_linear(router_weight), moe)
        return MoELayer(gate, self.router, moe_index)

    def _linear(self, templates: tuple[str, ...], index: int, with_bias: bool) -> Any:
        weight = self._stacked(templates, index, "weight", self.dtype)
        bias = self._stacked(templates, index, "bias", torch.float32) if with_bias else None
        return self.kernels.pack_linear(weight, bias)

    def _stacked(
        self, templates: tuple[str, ...], index: int, kind: str, dtype: torch.dtype
    ) -> torch.Tensor:
        """Rows of several projections one after the other."""
        parts = [
            self.checkpoint.read(f"{template.format(layer=index)}.{kind}", dtype)
            for template in templates
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _norm(self, template: str, index: int) -> RMSNorm:
        return RMSNorm(
            self.kernels, self._vector(_weight(template, index)), self.config.rms_norm_eps
        )

    def _vector(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name, torch.float32)


def load_experts(
    config: ModelConfig,
    checkpoint: WeightSource,
    kernels: Kernels,
    placement: ExpertPlacement,
    seat: int,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> GroupedExperts:
    """The physical experts of one seat, all MoE layers.

    Raises:
        CheckpointError: a tensor is missing or unreadable.
    """
    moe, names = config.moe, recipe_of(config.family).names.experts
    assert moe is not None, "a dense model has no experts to load"
    assert names is not None, "a recipe with moe but no expert names"
    physical_ids = placement.physical_on(seat)
    logical = [placement.physical_to_logical[physical] for physical in physical_ids]
    packed_layers = []
    for done, layer in enumerate(config.moe_layers, start=1):
        w13, w2 = _read_experts(checkpoint, names, moe, layer, logical, dtype)
        packed_layers.append(kernels.pack_experts(w13, w2))
        if progress is not None:
            progress("experts", done, len(config.moe_layers))
    return GroupedExperts(kernels, physical_ids, placement.num_physical, packed_layers)


def _read_experts(
    checkpoint: WeightSource,
    names: ExpertNames,
    moe: MoEConfig,
    layer: int,
    logical: list[int],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``w13 [num_local, 2 * width, hidden]`` and ``w2 [num_local, hidden, width]``."""
    width = moe.intermediate_size
    w13 = torch.empty((len(logical), 2 * width, moe.hidden_size), dtype=dtype)
    w2 = torch.empty((len(logical), moe.hidden_size, width), dtype=dtype)
    for local, expert in enumerate(logical):
        if names.fused_gate_up is not None and names.fused_down is not None:
            gate_up, down = (n.format(layer=layer) for n in (names.fused_gate_up, names.fused_down))
            w13[local] = checkpoint.read_rows(gate_up, expert, expert + 1, dtype)[0]
            w2[local] = checkpoint.read_rows(down, expert, expert + 1, dtype)[0]
            continue
        for template, out in (
            (names.gate, w13[local, :width]),
            (names.up, w13[local, width:]),
            (names.down, w2[local]),
        ):
            assert template is not None, "expert names are neither fused nor per expert"
            out.copy_(checkpoint.read(template.format(layer=layer, expert=expert), dtype))
    return w13, w2


def _weight(template: str, index: int) -> str:
    return f"{template.format(layer=index)}.weight"
