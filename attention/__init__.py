"""Everything on an attention rank except the MoE block: paged KV cache, decoder, models.

Glossary: block = ``block_size`` token positions of KV; slot = one token position in the cache
(``block * block_size + offset``); query_start_loc = prefix sums of query lengths (flash-attn's
cu_seqlens_q).
"""

if __name__ != "coterie.attention":
    raise ImportError(
        "import coterie.attention, not attention: two copies of a class never compare equal"
    )
