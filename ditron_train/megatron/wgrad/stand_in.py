"""A module in the place of apex's ``fused_weight_gradient_mlp_cuda`` (feature ``wgrad``).

Megatron-core's own linear layers call it if ``gradient_accumulation_fusion`` is on, and refuse to be built if
it is missing. Megatron-core looks for it once, when ``tensor_parallel.layers`` is imported, and keeps the answer as a
flag of that module, which a layer reads only if fusion is asked for. So the flag is replaced by one that provides the
module the first time it is read: a job without fusion sees no change, and other libraries that look for apex do not
find one.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

from ditron_train.gemm.main_grad import add_wgrad, product_of_transformer_engine
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings

#: Name of apex's module.
MODULE = "fused_weight_gradient_mlp_cuda"
_FLAG = "_grad_accum_fusion_available"


_stand_in: Any = ModuleType(MODULE, "Weight gradients added to main_grad by torch, in the place of apex's module.")
_stand_in.wgrad_gemm_accum_fp32 = _stand_in.wgrad_gemm_accum_fp16 = add_wgrad  # by the type of main_grad


class _Availability:
    """Megatron's flag: true, and whoever reads it finds the module from then on."""

    def __bool__(self) -> bool:
        if sys.modules.setdefault(MODULE, _stand_in) is _stand_in:
            by = "torch's addmm" if product_of_transformer_engine() is None else "Transformer Engine's GEMM"
            log_once(
                "wgrad provided",
                f"wgrad: {by} adds weight gradients to main_grad, as {MODULE} of apex is not installed "
                "(DITRON_WGRAD=off: Megatron raises an error instead)",
            )
        return True


_availability = _Availability()


def class_map() -> dict[type, type]:
    """No class is replaced."""
    return {}


def is_provided() -> bool:
    """Whether a layer with gradient accumulation fusion was built that calls this module."""
    return sys.modules.get(MODULE) is _stand_in


def start() -> None:
    """Puts the module in the place of apex's if that is missing; apex's own is never replaced."""
    from megatron.core.tensor_parallel import layers

    namespace = vars(layers)
    if get_settings().wgrad == "off":
        log_once("wgrad off", "wgrad: off by DITRON_WGRAD")
    elif _FLAG not in namespace:
        words = f"wgrad: this Megatron-core asks for {MODULE} in another way; stock Megatron"
        log_once("wgrad unknown", words, level=logging.WARNING)
    elif namespace[_FLAG] is not _availability and namespace[_FLAG]:
        log_once("wgrad apex", f"wgrad: nothing to provide, {MODULE} is installed")
    else:
        # Row layers call the module without having read the flag.
        namespace.update({MODULE: _stand_in, _FLAG: _availability})


def stop() -> None:
    """Megatron-core refuses fusion again. If a layer was built with it the module stays, for its backward."""
    from megatron.core.tensor_parallel import layers

    namespace = vars(layers)
    if namespace.get(_FLAG) is _availability:
        namespace[_FLAG] = False
        if not is_provided():
            del namespace[MODULE]
