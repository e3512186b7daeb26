"""Feature ``ep``: megatron-core's MoE layer with this package's dispatcher, and what the feature replaces."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)

from ditron_train.megatron.ep.coverage import unsupported_reason_kind
from ditron_train.megatron.ep.dispatcher import DitronMoEAlltoAllTokenDispatcher
from ditron_train.megatron.ep.flex_dispatcher import DitronMoEFlexTokenDispatcher, deepep_optional
from ditron_train.megatron.ep.gathered_dispatcher import DitronMoEAllGatherTokenDispatcher
from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.megatron.shared.interfaces import classes_of_te
from ditron_train.policy import gate, log_native

_DISPATCHERS: dict[type, Any] = {
    MoEAlltoAllTokenDispatcher: DitronMoEAlltoAllTokenDispatcher,
    MoEAllGatherTokenDispatcher: DitronMoEAllGatherTokenDispatcher,
    MoEFlexTokenDispatcher: DitronMoEFlexTokenDispatcher,
}


class DitronMoELayer(MoELayer, metaclass=EqualsBaseClass, native=MoELayer):
    """``MoELayer`` with our dispatcher: the native layer builds its dispatcher from the configuration, not from a
    spec."""

    token_dispatcher: Any

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        **kwargs: Any,  # of newer versions: is_mtp_layer, name
    ) -> None:
        pg_collection = pg_collection if pg_collection is not None else get_default_pg_collection()
        with deepep_optional():  # our dispatcher comes in the place of the native one, or raises
            super().__init__(config, submodules, layer_number, pg_collection, **kwargs)
        fused = _DISPATCHERS.get(type(self.token_dispatcher))
        if fused is not None:
            self.token_dispatcher = fused(
                self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=pg_collection
            )
            if self.use_shared_expert and self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)
        if hasattr(self.token_dispatcher, "meet_experts"):  # of this package, with GEMMs that it can be fused with
            self.token_dispatcher.meet_experts(self._modules)
        elif not isinstance(self.token_dispatcher, DitronMoEFlexTokenDispatcher):
            log_native(
                "ep", unsupported_reason_kind(config.moe_token_dispatcher_type) or "the dispatcher is another's"
            )


def class_map() -> dict[type, type]:
    """The native classes and the fused ones; Transformer Engine's grouped layers are among them if it is
    installed."""
    classes: dict[type, type] = {**_DISPATCHERS, MoELayer: DitronMoELayer}
    if HAVE_TE:
        classes.update(classes_of_te("ep", _classes_of_te))
    return classes


def _classes_of_te() -> dict[type, type]:
    from ditron_train.megatron.ep import te_experts

    return te_experts.class_map()


def stop() -> None:
    """Forget what the policy said."""
    gate.forget("ep")
