"""Which tensors a model needs, and their shapes: the list a checkpoint is validated against."""

from coterie.attention.models.config import ModelConfig
from coterie.attention.models.recipe import WeightNames
from coterie.attention.models.registry import recipe_of

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Shape of every tensor the loader reads, by name."""
    names = recipe_of(config.family).names
    hidden = config.hidden_size
    shapes: Shapes = {
        names.embed_tokens: (config.vocab_size, hidden),
        names.norm: (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[names.lm_head] = (config.vocab_size, hidden)
    moe_layers = frozenset(config.moe_layers)
    for layer in range(config.num_layers):
        shapes |= _attention_shapes(config, names, layer)
        if layer in moe_layers:
            shapes |= _expert_shapes(config, names, layer)
        else:
            shapes |= _mlp_shapes(config, names, layer)
    return shapes


def _attention_shapes(config: ModelConfig, names: WeightNames, layer: int) -> Shapes:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    projections = (
        (names.q_proj, q_size, hidden),
        (names.k_proj, kv_size, hidden),
        (names.v_proj, kv_size, hidden),
        (names.o_proj, hidden, q_size),
    )
    shapes: Shapes = {}
    for template, rows, columns in projections:
        prefix = template.format(layer=layer)
        shapes[f"{prefix}.weight"] = (rows, columns)
        if config.attention_bias:
            shapes[f"{prefix}.bias"] = (rows,)
    for template in (names.input_norm, names.post_attention_norm):
        shapes[f"{template.format(layer=layer)}.weight"] = (hidden,)
    if config.qk_norm:
        for template in (names.q_norm, names.k_norm):
            shapes[f"{template.format(layer=layer)}.weight"] = (head_dim,)
    return shapes


def _mlp_shapes(config: ModelConfig, names: WeightNames, layer: int) -> Shapes:
    hidden, width = config.hidden_size, config.intermediate_size
    projections = (
        (names.gate_proj, width, hidden),
        (names.up_proj, width, hidden),
        (names.down_proj, hidden, width),
    )
    shapes: Shapes = {}
    for template, rows, columns in projections:
        prefix = template.format(layer=layer)
        shapes[f"{prefix}.weight"] = (rows, columns)
        if config.mlp_bias:
            shapes[f"{prefix}.bias"] = (rows,)
    return shapes


def _expert_shapes(config: ModelConfig, names: WeightNames, layer: int) -> Shapes:
    moe, experts = config.moe, names.experts
    assert moe is not None, "moe_layers without moe"
    assert experts is not None, "a recipe with moe_layers but no expert names"
    hidden, width = moe.hidden_size, moe.intermediate_size
    shapes: Shapes = {experts.router.format(layer=layer): (moe.num_experts, hidden)}
    for template, shape in (
        (experts.fused_gate_up, (moe.num_experts, 2 * width, hidden)),
        (experts.fused_down, (moe.num_experts, hidden, width)),
    ):
        if template is not None:
            shapes[template.format(layer=layer)] = shape
    for template, expert_shape in (
        (experts.gate, (width, hidden)),
        (experts.up, (width, hidden)),
        (experts.down, (hidden, width)),
    ):
        if template is not None:
            for expert in range(moe.num_experts):
                shapes[template.format(layer=layer, expert=expert)] = expert_shape
    return shapes
