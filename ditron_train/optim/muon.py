"""Muon: momentum, orthogonalised by Newton-Schulz, for matrices; AdamW for everything else.

For a matrix W with gradient G (fp32, in this order, each rounded as torch rounds it):

    W <- W - weight_decay * lr * W                     (decoupled decay)
    M <- lerp(M, G, 1 - momentum_beta)
    D  = lerp(G, M, momentum_beta) with nesterov, else M
    O  = NewtonSchulz(D)                                of q, k and v apart if ``split_qkv``
    W <- W - lr * O * scale(rows, columns) * extra_scale_factor

The bits are those of the same formulas with whole cuBLAS products and torch's elementwise operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.optim.elementwise import DecayMethod, adamw_step, apply_update, momentum_step
from ditron_train.optim.kept_state import CopiedWithOptions
from ditron_train.optim.newton_schulz import (
    CoefficientType,
    ScaleMode,
    fp32_matmul_precision,
    muon_scale,
    newton_schulz,
    step_coefficients,
)
from ditron_train.optim.options import (
    PRODUCT_DTYPES,
    TensorParallelMode,
    default_algorithm,
    unsupported_reason_group,
    unsupported_reason_options,
    unsupported_reason_param,
)
from ditron_train.optim.plans import ProductMode
from ditron_train.optim.sharding import LayerShards, shard_matrices, warn_of_foreign_momentum
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile


@outside_compile
class Muon(CopiedWithOptions):
    """Muon for matrices, AdamW for other parameters.

    A parameter takes Muon if it has two dimensions and no true ``is_embedding_or_output_parameter`` attribute; a
    param group may say ``algorithm="muon"`` or ``"adamw"`` for all of its parameters (embeddings and output layers are
    matrices too: put them in a group with ``"adamw"``).

    Args:
        params: Parameters, named parameters or param groups.
        lr: Learning rate.
        momentum_beta: How much of the momentum stays.
        use_nesterov: Whether to look ahead.
        weight_decay: 0 for none.
        weight_decay_method: ``decoupled`` (times lr), ``independent`` (not times lr) or ``l2`` (added to the
            gradient).
        fp32_matmul_prec: ``medium`` runs the products in bf16; ``high`` and ``highest`` in fp32, by torch alone.
        coefficient_type: Polynomials of Newton-Schulz; any but ``quintic`` changes results against Megatron's Muon.
        num_ns_steps: Newton-Schulz steps.
        scale_mode: See ``muon_scale``.
        extra_scale_factor: Multiplies every update.
        adamw_betas: Of parameters that take AdamW.
        adamw_eps: Likewise.
        split_qkv: Orthogonalise q, k and v of attention weights apart.
        is_qkv_fn: Which parameters those are.
        qkv_split_shapes: Rows of q, k and v in one query group.
        tp_mode: ``blockwise`` orthogonalises each tensor-parallel shard by itself; ``duplicated`` gathers the
            direction over the tensor-parallel group along the parameter's ``partition_dim``, computes it whole on
            every rank, and keeps the own part.
        tp_group_fn: Gives the tensor-parallel group of a parameter, or None.
        shard_group: Shards whole matrices over this (data-parallel) group: each is stepped by one rank, balanced by
            cost, and sent to the others while the next is computed. Gradients must be equal on all of its ranks.
            Momentum then lives on the owner alone: each rank saves and loads a ``state_dict`` of its own.
        mode: Which products run by our kernels: ``strict`` if proven equal and faster, ``force``, ``native``.
        eps: Lower bound of the norm of what is orthogonalised.

    Attributes:
        after_matrix: Called with each parameter that takes Muon once its update is enqueued (or it was passed over,
            for want of a gradient), in the order of the param groups; not with ``shard_group``.

    Raises:
        NotSupportedError: Values out of range, or a parameter that ``algorithm="muon"`` cannot take.
    """

    after_matrix: Callable[[torch.Tensor], None] | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        momentum_beta: float = 0.95,
        use_nesterov: bool = True,
        weight_decay: float = 0.01,
        *,
        weight_decay_method: DecayMethod = "decoupled",
        fp32_matmul_prec: str = "medium",
        coefficient_type: CoefficientType = "quintic",
        num_ns_steps: int = 5,
        scale_mode: ScaleMode = "spectral",
        extra_scale_factor: float = 1.0,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        split_qkv: bool = False,
        is_qkv_fn: Callable[[torch.Tensor], bool] | None = None,
        qkv_split_shapes: tuple[int, int, int] | None = None,
        tp_mode: TensorParallelMode = "blockwise",
        tp_group_fn: Callable[[torch.Tensor], dist.ProcessGroup | None] | None = None,
        shard_group: dist.ProcessGroup | None = None,
        mode: ProductMode = "strict",
        eps: float = 1e-7,
    ) -> None:
        reason = unsupported_reason_options(
            fp32_matmul_prec, weight_decay_method, tp_mode, split_qkv, is_qkv_fn, qkv_split_shapes
        )
        if reason is not None:
            raise NotSupportedError(reason)
        step_coefficients(coefficient_type, num_ns_steps)
        muon_scale(1, 1, scale_mode)
        self.coefficient_type = coefficient_type
        self.num_ns_steps = num_ns_steps
        self.scale_mode = scale_mode
        self.extra_scale_factor = extra_scale_factor
        self.weight_decay_method = weight_decay_method
        self.split_qkv = split_qkv
        self.is_qkv_fn = is_qkv_fn
        self.qkv_split_shapes = tuple(qkv_split_shapes) if qkv_split_shapes is not None else None
        self.tp_mode = tp_mode
        self.tp_group_fn = tp_group_fn
        self.shard_group = shard_group
        self.mode = mode
        self.eps = eps
        defaults = dict(
            lr=lr, momentum_beta=momentum_beta, use_nesterov=use_nesterov, weight_decay=weight_decay,
            fp32_matmul_prec=fp32_matmul_prec, adamw_betas=adamw_betas, adamw_eps=adamw_eps, algorithm=None,
        )  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's optimizers do; checks its hyperparameters and what it asks Muon to take."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except NotSupportedError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by ``load_state_dict``: groups saved by another Muon lack some hyperparameters, which are
        defaults."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's optimizers. With ``shard_group`` each rank loads what it has saved itself; a rank to whose
        matrices another's momentum came warns."""
        super().load_state_dict(state_dict)
        if self.shard_group is None:
            return
        matrices = [p for group in self.param_groups for p in group["params"] if self._algorithm(group, p) == "muon"]
        has_momentum = [index for index, p in enumerate(matrices) if "momentum_buffer" in self.state.get(p, ())]
        owners = shard_matrices(matrices, self.num_ns_steps, self.shard_group)
        warn_of_foreign_momentum(owners[dist.get_rank(self.shard_group)], has_momentum)

    def _value(self, group: dict[str, Any], name: str) -> Any:
        """A hyperparameter that holds for a group."""
        return group[name]

    def _check_group(self, group: dict[str, Any]) -> None:
        algorithm = self._value(group, "algorithm")
        beta = self._value(group, "momentum_beta")
        reason = unsupported_reason_group(group["lr"], group["weight_decay"], beta, algorithm)
        for param in group["params"]:
            reason = reason or unsupported_reason_param(param, algorithm, self._algorithm(group, param) == "muon")
        if reason is not None:
            raise NotSupportedError(reason)

    def _algorithm(self, group: dict[str, Any], param: torch.Tensor) -> str:
        return self._value(group, "algorithm") or default_algorithm(param)

    @torch.no_grad()
    @outside_compile
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter that has a gradient; returns the closure's loss.

        Raises:
            NotSupportedError: A sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices: list[tuple[torch.Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            others = []
            for param in group["params"]:
                if self._algorithm(group, param) == "muon":
                    matrices.append((param, group))
                elif param.grad is not None:
                    others.append(param)
            adamw_step(group, self.state, others)
        if self.shard_group is not None and dist.get_world_size(self.shard_group) > 1:
            self._sharded_step(matrices, self.shard_group)
        else:
            for param, group in matrices:
                self._step_matrix(param, group)
                if self.after_matrix is not None:
                    self.after_matrix(param)
        return loss

    def _sharded_step(
        self, matrices: list[tuple[torch.Tensor, dict[str, Any]]], shard_group: dist.ProcessGroup
    ) -> None:
        params = [param for param, _ in matrices]
        shards = LayerShards(params, shard_matrices(params, self.num_ns_steps, shard_group), shard_group)
        shards.run(lambda index: self._step_matrix(*matrices[index]))

    def _step_matrix(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.grad is not None:
            self.apply_direction(param, self._direction(param, group), group)

    def _qkv_rows(self, param: torch.Tensor) -> tuple[int, ...] | None:
        """Rows of q, k and v in one query group of a weight that is split; None of any other."""
        if not self.split_qkv:
            return None
        assert self.is_qkv_fn is not None and self.qkv_split_shapes is not None, "checked when the optimizer was made"
        return self.qkv_split_shapes if self.is_qkv_fn(param) else None

    def _direction(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Decay and momentum of one matrix; what to orthogonalise."""
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            raise NotSupportedError("Muon does not take sparse gradients")
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        return momentum_step(
            param,
            state["momentum_buffer"],
            grad,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            decay_method=self.weight_decay_method,
            momentum_beta=self._value(group, "momentum_beta"),
            use_nesterov=self._value(group, "use_nesterov"),
        )

    def apply_direction(self, param: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]) -> None:
        """Orthogonalises ``direction`` and updates ``param`` with it, component by component if q, k, v are
        split; an empty one has nothing to update, on any rank."""
        if param.numel() == 0:
            return
        for target, part in self._components(param, direction):
            self._apply_component(param, target, part, group)

    def _components(self, param: torch.Tensor, direction: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(what to update, its direction) of a whole matrix, or of its q, k and v if they are split."""
        qkv_rows = self._qkv_rows(param)
        if qkv_rows is None:
            yield param, direction
            return
        rows_per_group = sum(qkv_rows)
        if param.shape[0] % rows_per_group:
            raise NotSupportedError(
                f"qkv weight of {param.shape[0]} rows does not divide into groups of {rows_per_group}"
            )
        num_groups, columns = param.shape[0] // rows_per_group, param.shape[1]
        whole = param.view(num_groups, rows_per_group, columns)
        parts = torch.split(direction.view(whole.shape), list(qkv_rows), dim=1)
        first = 0
        for part in parts:
            rows = part.shape[1]
            # a copy, as native makes one: the norm's order of summation depends on the memory it reads
            yield whole[:, first : first + rows], part.reshape(-1, columns)
            first += rows

    def _apply_component(
        self, param: torch.Tensor, target: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Updates ``target`` (the parameter or the rows of one component) by the orthogonal factor of
        ``direction``."""
        rows, columns = direction.shape
        tp_group, dim = _partition(self, param)
        gathered = direction
        if tp_group is not None:
            shards = [torch.empty_like(direction) for _ in range(dist.get_world_size(tp_group))]
            dist.all_gather(shards, direction.contiguous(), group=tp_group)
            gathered = torch.cat(shards, dim=dim)
            del shards
            rows, columns = gathered.shape
        precision = self._value(group, "fp32_matmul_prec")
        with fp32_matmul_precision(precision):
            x = newton_schulz(
                gathered.to(torch.float32),
                num_steps=self.num_ns_steps,
                coefficient_type=self.coefficient_type,
                eps=self.eps,
                dtype=PRODUCT_DTYPES[precision],
                mode=self.mode if precision == "medium" or direction.device.type == "cpu" else "native",
                borrow=True,
            )
        if tp_group is not None:
            x_dim = 1 - dim if rows > columns else dim
            x = x.chunk(dist.get_world_size(tp_group), dim=x_dim)[dist.get_rank(tp_group)]
        apply_update(
            target,
            x,
            transposed=rows > columns,
            scale=muon_scale(rows, columns, self.scale_mode),
            extra_scale=self.extra_scale_factor,
            lr=float(group["lr"]),
        )


def _partition(optimizer: Muon, param: torch.Tensor) -> tuple[dist.ProcessGroup | None, int]:
    """The group to gather a direction over and the dimension it is cut along; (None, -1) if none is needed."""
    if optimizer.tp_mode == "blockwise" or optimizer.tp_group_fn is None:
        return None, -1
    dim = getattr(param, "partition_dim", None)
    tp_group = optimizer.tp_group_fn(param)
    if dim is None or dim < 0 or tp_group is None or dist.get_world_size(tp_group) == 1:
        return None, -1
    return tp_group, dim
