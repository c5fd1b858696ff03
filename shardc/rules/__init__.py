"""The rules of all ops. Importing this package, or any part of it, fills the registry."""

# Rule modules first: each registers its ops as it is imported.
from shardc.rules import (
    attention,
    conv,
    creation,
    ctc,
    embedding,
    experts,
    fft,
    indexing,
    linalg,
    matmul,
    norm,
    pointwise,
    random,
    reduction,
    section,
    view,
)
from shardc.rules.registry import Example, OpRule, all_rules, example, find_rule, rule, rule_of

__all__ = [
    "Example",
    "OpRule",
    "all_rules",
    "attention",
    "conv",
    "creation",
    "ctc",
    "embedding",
    "example",
    "experts",
    "fft",
    "find_rule",
    "indexing",
    "linalg",
    "matmul",
    "norm",
    "pointwise",
    "random",
    "reduction",
    "rule",
    "rule_of",
    "section",
    "view",
]
