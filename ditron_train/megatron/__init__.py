"""Layer 5: plugs the ops into megatron-core. The only layer that imports megatron, and only when something is switched
on.

Four ways in:

1. No edit: ``torchrun ... -m ditron_train.megatron.run pretrain_gpt.py <args> --ditron tp``.
2. Two lines in the script: ``extra_args_provider=add_ditron_args``, and ``apply_args(args)`` after it or, up to
   megatron-core 0.17, ``wrap_model_provider(model_provider)``.
3. Python: ``spec = apply(spec, features=("tp",))``, or ``apply()`` before models are built; `restore` is the inverse.
4. ``DITRON=tp`` in the environment, with the hook of `ditron_train.hook` or with `enable` as a framework's init hook.
"""

from ditron_train.megatron.plugin.arguments import add_ditron_args
from ditron_train.megatron.plugin.lifecycle import release
from ditron_train.megatron.plugin.switch import (
    active_features,
    apply,
    apply_args,
    enable,
    restore,
    wrap_model_provider,
)

__all__ = [
    "active_features",
    "add_ditron_args",
    "apply",
    "apply_args",
    "enable",
    "release",
    "restore",
    "wrap_model_provider",
]
