"""What differs between the versions of Megatron-core that are supported, and what of a newer one is not covered yet.

Everything that asks for a version's own names is here: features ask these functions.
"""

from ditron_train.megatron.compat.activation import activate_experts
from ditron_train.megatron.compat.config import (
    captured_parts,
    captures_dispatch,
    captures_iteration,
    padded_routing,
    rope_arguments,
    unsupported_reason_arguments,
    unsupported_reason_dispatcher,
    unsupported_reason_experts,
    unsupported_reason_grouped_layer,
    unsupported_reason_weight,
)
from ditron_train.megatron.compat.muon import (
    availability_owner,
    common_arguments,
    has_file_per_rank,
    momentum_key,
    muon_module,
    norm_eps,
    registered_muon,
    unsupported_reason_layer_wise,
)
from ditron_train.megatron.compat.wgrad import multiplies_rows_of_frozen, write_wgrad

__all__ = [
    "activate_experts",
    "availability_owner",
    "captured_parts",
    "captures_dispatch",
    "captures_iteration",
    "common_arguments",
    "has_file_per_rank",
    "momentum_key",
    "multiplies_rows_of_frozen",
    "muon_module",
    "norm_eps",
    "padded_routing",
    "registered_muon",
    "rope_arguments",
    "unsupported_reason_arguments",
    "unsupported_reason_dispatcher",
    "unsupported_reason_experts",
    "unsupported_reason_grouped_layer",
    "unsupported_reason_layer_wise",
    "unsupported_reason_weight",
    "write_wgrad",
]
