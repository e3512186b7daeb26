"""What differs between the versions of Megatron-core that are supported, and what of a newer one is not covered yet.

Everything that asks for a version's own names lies here: features ask these functions.
"""

from ditron_train.megatron.compat.config import (
    captured_parts,
    captures_dispatch,
    captures_iteration,
    why_not_arguments,
    why_not_experts,
    why_not_muon,
    why_not_weight,
)

__all__ = [
    "captured_parts",
    "captures_dispatch",
    "captures_iteration",
    "why_not_arguments",
    "why_not_experts",
    "why_not_muon",
    "why_not_weight",
]
