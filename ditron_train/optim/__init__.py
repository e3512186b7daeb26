"""Layer 3: optimizers. Muon whose step has the bits of the native one in less time."""

from ditron_train.optim.muon import Muon
from ditron_train.optim.newton_schulz import muon_scale, newton_schulz, orthogonalize
from ditron_train.optim.plans import plan_products
from ditron_train.optim.products import addmm, gram, scaled_square
from ditron_train.optim.sharding import LayerShards, newton_schulz_cost, shard_by_cost

__all__ = [
    "LayerShards",
    "Muon",
    "addmm",
    "gram",
    "muon_scale",
    "newton_schulz",
    "newton_schulz_cost",
    "orthogonalize",
    "plan_products",
    "scaled_square",
    "shard_by_cost",
]
