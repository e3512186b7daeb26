"""Muon in each version of Megatron-core: where it is, what its arguments are called, how the fused path takes its
place.

0.16 and 0.17 name the class in ``optimizer/muon.py``, which builds it by that name. Since 0.18 it is in
``optimizer/emerging_optimizers.py``, whose registry builds it, and some arguments have other names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ditron_train.runtime.errors import NotSupportedError

_NEWER_MODULE = "megatron.core.optimizer.emerging_optimizers"
_COMMON_NAMES = {"momentum": "momentum_beta", "nesterov": "use_nesterov", "tp_mode": "mode"}  # since 0.18: in 0.16
_ARGUMENTS = frozenset(
    (
        "params lr momentum_beta use_nesterov weight_decay use_decoupled_weight_decay split_qkv is_qkv_fn "
        "qkv_split_shapes fp32_matmul_prec coefficient_type num_ns_steps scale_mode extra_scale_factor "
        "pg_collection mode"
    ).split()
)
_NORM_EPS = 1e-7  # emerging_optimizers up to 0.3


def muon_module() -> ModuleType:
    """The module that defines ``TensorParallelMuon`` and knows its base class."""
    is_newer = importlib.util.find_spec(_NEWER_MODULE) is not None
    return importlib.import_module(_NEWER_MODULE if is_newer else "megatron.core.optimizer.muon")


def availability_owner() -> Any:
    """The module whose ``HAVE_EMERGING_OPTIMIZERS`` Megatron asks before it builds Muon."""
    module = muon_module()
    return importlib.import_module("megatron.core.optimizer") if module.__name__ == _NEWER_MODULE else module


def registered_muon() -> dict[str, Any] | None:
    """The attributes of the registry's entry for Muon, ``optimizer_cls`` among them; None if there is no registry
    (0.16, 0.17)."""
    registry = getattr(muon_module(), "_EMERGING_OPTIMIZERS", None)
    return None if registry is None else vars(registry["muon"])


def common_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``TensorParallelMuon`` by the names of 0.16.

    Raises:
        NotSupportedError: One that 0.16 does not have asks for something, as use_syrk for other sums.
    """
    known = inspect.signature(muon_module().TensorParallelMuon.__init__).parameters
    common = {}
    for name, value in arguments.items():
        if (common_name := _COMMON_NAMES.get(name, name)) in _ARGUMENTS:
            common[common_name] = value
        elif name not in known or value != known[name].default:
            raise NotSupportedError(f"{name}={value} is not covered")
    return common


@functools.cache
def momentum_key() -> str:
    """What param groups, and so checkpoints, of Megatron's Muon call the momentum's factor: it is
    ``emerging_optimizers`` that names it."""
    module = muon_module()
    base = module.OrthogonalizedOptimizer
    names = inspect.signature((module.TensorParallelMuon if base is object else base).__init__).parameters
    return "momentum" if "momentum" in names else "momentum_beta"


@functools.cache
def norm_eps() -> float:
    """Lower bound of the norm that Newton-Schulz divides by: ``emerging_optimizers`` 0.4 lowered it."""
    newton_schulz_tp = getattr(muon_module(), "newton_schulz_tp", None)
    utilities = inspect.getmodule(newton_schulz_tp)
    newton_schulz = getattr(utilities, "newton_schulz", None)
    eps = inspect.signature(newton_schulz).parameters.get("eps") if newton_schulz is not None else None
    return _NORM_EPS if eps is None else float(eps.default)


def unsupported_reason_layer_wise(config: Any, arguments: Mapping[str, Any]) -> str | None:
    """Why Megatron's own layer-wise optimizer gathers the parameters, or None.

    Args:
        config: The optimizer's configuration.
        arguments: What its constructor got beyond 0.16's arguments.
    """
    chunks = arguments.get("model_chunks") or ()
    if any(getattr(chunk, "full_param_layout", None) is not None for chunk in chunks):
        return "the parameters are in buffers that data parallelism gathers (use_layer_wise_param_layout)"
    # 0.16 neither asks for the flag here nor takes the model
    if arguments.get("async_allgather") or ("model_chunks" in arguments and config.overlap_param_gather):
        return "overlap_param_gather gathers the parameters before each layer"
    return None


def has_file_per_rank() -> bool:
    """Whether checkpoints of Megatron's training loop hold a file of what each data-parallel rank owns: those in the
    format ``torch``. Of a loop of another script nothing is known."""
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    return "torch" in (getattr(args, "ckpt_format", None), getattr(args, "ckpt_convert_format", None))
