"""Pure compute of experts: placement, grouped matmuls, kernels. A leaf.

Glossary: logical expert = as in the model; physical expert = one loaded copy of a logical expert;
local expert = a physical expert of this rank; redundant expert = a copy beyond the first.
"""

if __name__ != "coterie.experts":
    raise ImportError(
        "import coterie.experts, not experts: two copies of a class never compare equal"
    )
