"""Stands in for ``emerging_optimizers``, which is not on PyPI, so that Megatron's native Muon can be the reference.

What megatron-core takes from it is written here from the published equations, in torch's operators alone: of 0.1.0 for
megatron-core 0.16 and 0.17, of 0.2.0 (other names, and a registry) for newer ones. Install it before
``megatron.core.optimizer`` is imported; if the real package is installed, nothing is changed.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.optim.newton_schulz import CoefficientType, fp32_matmul_precision, muon_scale, step_coefficients
from ditron_train.optim.reference import reference_newton_schulz, reference_step
from ditron_train.runtime.versions import find_versions

_PACKAGE = "emerging_optimizers"
_USERS = ("megatron.core.optimizer.muon", "megatron.core.optimizer.emerging_optimizers")


def install() -> bool:
    """Makes ``import emerging_optimizers`` work; returns whether the stand-in is what it gives. Idempotent.

    Raises:
        RuntimeError: A part of megatron-core that uses it was imported before without it.
    """
    if is_stand_in():
        return True
    if importlib.util.find_spec(_PACKAGE) is not None:
        return False
    imported = [name for name in _USERS if name in sys.modules]
    if imported:
        raise RuntimeError(f"{imported[0]} was imported before {_PACKAGE} was there")
    is_newer = _version() == "0.2.0"
    optimizers = dict(
        OrthogonalizedOptimizer=_NewerOrthogonalizedOptimizer if is_newer else OrthogonalizedOptimizer,
        AdaptiveMuon=_Unavailable,
        get_muon_scale_factor=muon_scale,
    )
    _add_module("", is_ditron_stand_in=True)
    _add_module("orthogonalized_optimizers", **optimizers)
    _add_module("orthogonalized_optimizers.muon_utils", newton_schulz_tp=_newton_schulz_tp, NSCoeffT=CoefficientType)
    _add_module("registry", get_optimizer_name_list=list)
    _add_module("scalar_optimizers", Lion=_Unavailable)
    _add_module("soap", SOAP=_Unavailable)
    sys.meta_path.append(_Metadata())
    return True


def _add_module(name: str, **contents: Any) -> None:
    """Makes ``import emerging_optimizers.name`` give a module of ``contents``."""
    full_name = f"{_PACKAGE}.{name}" if name else _PACKAGE
    module = types.ModuleType(full_name)
    vars(module).update(contents)
    module.__path__ = []  # a package, so that its submodules are found in sys.modules
    module.__spec__ = importlib.util.spec_from_loader(full_name, loader=None, is_package=True)
    sys.modules[full_name] = module
    parent, _, last = full_name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def _version() -> str:
    """Of ``emerging_optimizers``: what the megatron-core here asks for."""
    version = find_versions()["megatron-core"]
    is_newer = version is not None and tuple(map(int, version.split(".")[:2])) >= (0, 18)
    return "0.2.0" if is_newer else "0.1.0"


class _Distribution(metadata.Distribution):
    """What pip would know of it: newer versions of megatron-core ask there."""

    def read_text(self, filename: str) -> str | None:
        """A file of the distribution."""
        return f"Name: emerging-optimizers\nVersion: {_version()}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """There are no files."""
        raise FileNotFoundError(path)


class _Metadata(metadata.DistributionFinder):
    """Finds `_Distribution`, and no module."""

    def find_spec(self, *arguments: Any) -> None:
        """No module is found here: they are in ``sys.modules``."""

    def find_distributions(self, context: Any = None) -> list[metadata.Distribution]:
        """The stand-in, if all distributions are asked for, or it."""
        name = None if context is None else context.name
        is_asked = name is None or name.lower().replace("_", "-") == "emerging-optimizers"
        return [_Distribution()] if is_asked else []


class _Unavailable:
    """Stands for an optimizer that is not written here."""


def is_stand_in() -> bool:
    """Whether the stand-in is installed in this process."""
    return getattr(sys.modules.get(_PACKAGE), "is_ditron_stand_in", False)


def _newton_schulz(x: torch.Tensor, steps: int, coefficient_type: CoefficientType, **options: Any) -> torch.Tensor:
    dtype = torch.bfloat16 if torch.get_float32_matmul_precision() == "medium" else x.dtype
    return reference_newton_schulz(x, dtype, step_coefficients(coefficient_type, steps), **options)


def _newton_schulz_tp(
    x: torch.Tensor,
    steps: int,
    coefficient_type: CoefficientType,
    tp_group: dist.ProcessGroup,
    partition_dim: int | None = None,
    mode: str = "duplicated",
    tp_mode: str | None = None,
) -> torch.Tensor:
    """Whole if the matrix is not cut; else gathered, computed on every rank and cut again, or (``distributed``) as
    it is cut."""
    if partition_dim is None:
        return _newton_schulz(x, steps, coefficient_type)
    if "distributed" in (mode, tp_mode):
        return _newton_schulz(x, steps, coefficient_type, transpose=partition_dim == 0, group=tp_group)
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size(tp_group))]
    dist.all_gather(shards, x.contiguous(), group=tp_group)
    whole = _newton_schulz(torch.cat(shards, dim=partition_dim), steps, coefficient_type)
    return whole.chunk(len(shards), dim=partition_dim)[dist.get_rank(tp_group)]


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Momentum whose direction is replaced by what ``orthogonalize`` makes of it, matrix by matrix."""

    _momentum_key = "momentum_beta"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum_beta: float,
        *,
        use_nesterov: bool,
        weight_decay: float,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
    ) -> None:
        self.use_nesterov = use_nesterov
        self.weight_decay_method = weight_decay_method
        self.fp32_matmul_prec = fp32_matmul_prec
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn
        super().__init__(params, {"lr": lr, self._momentum_key: momentum_beta, "weight_decay": weight_decay})

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Orthogonalizes a direction; subclasses split it or gather it."""
        return self.scaled_orthogonalize_fn(grad)

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for param in group["params"]:
            if not self.state[param] and not (skip_non_grad_params and param.grad is None):
                self.state[param]["momentum_buffer"] = torch.zeros_like(param.data)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter with a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(param, group)
        return loss

    def _step_one(self, param: Any, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param.grad)

        def orthogonalized(direction: torch.Tensor) -> torch.Tensor:
            with fp32_matmul_precision(self.fp32_matmul_prec):
                return self.orthogonalize(param, direction)

        decay = "l2" if self.weight_decay_method == "l2" else "decoupled"
        options: dict[str, Any] = dict(lr=group["lr"], weight_decay=group["weight_decay"], decay=decay)
        options.update(momentum_beta=group[self._momentum_key], nesterov=self.use_nesterov, update_of=orthogonalized)
        reference_step(param, state["momentum_buffer"], param.grad, **options)


class _NewerOrthogonalizedOptimizer(OrthogonalizedOptimizer):
    """The same by the names of 0.2.0."""

    _momentum_key = "momentum"

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, *, nesterov: bool, **kwargs: Any) -> None:
        super().__init__(params, lr, momentum, use_nesterov=nesterov, **kwargs)
