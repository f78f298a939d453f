"""Tokens out to the ranks that hold their experts, and back.

Glossary: gate = top-k scoring of one MoE layer; round = one layer's dispatch from one attention
rank to one expert rank, and its reply; seat = permanent index of a rank; epoch = membership
generation; gather = the rounds of one layer that an expert rank computes in one pass.
"""

if __name__ != "coterie.router":
    raise ImportError(
        "import coterie.router, not router: two copies of a class never compare equal"
    )
