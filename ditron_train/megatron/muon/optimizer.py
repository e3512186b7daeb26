"""``--ditron muon``: Megatron's ``--optimizer muon`` and ``dist_muon`` with ``ditron_train.optim.Muon`` inside.

Megatron's own ``get_megatron_muon_optimizer`` still chooses parameters, groups and wrappers. Two classes that it
builds are replaced: the optimizer of matrices, and the wrapper that shards them over data-parallel ranks. It also runs
if ``emerging_optimizers`` is not installed, which native refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.optimizer import layer_wise_optimizer as native_layer_wise
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ditron_train.megatron.compat import muon as compat
from ditron_train.megatron.compat.config import unsupported_reason_weight
from ditron_train.megatron.plugin import patching
from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.optim import LayerShards, Muon, newton_schulz_cost, shard_by_cost
from ditron_train.optim.newton_schulz import CoefficientType, ScaleMode
from ditron_train.optim.options import TensorParallelMode
from ditron_train.policy.self_check import self_check
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.groups import broadcast_together
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.settings import get_settings

_SMALL_ELEMENTS = 1 << 20  # tensors below this are sent together: single collectives would cost more than their bytes
_NATIVE = compat.muon_module().TensorParallelMuon
_NATIVE_COEFFICIENTS = ("quintic", "simple")  # of which Muon has the same sets
_had_emerging_optimizers: list[bool] = []


def class_map() -> dict[type, type]:
    """The wrapper of ``dist_muon``; the optimizer itself is no subclass of native's and is replaced by `start`."""
    return {native_layer_wise.LayerWiseDistributedOptimizer: DitronLayerWiseDistributedOptimizer}


def start() -> None:
    """Replaces both classes, and lets native code run without ``emerging_optimizers``."""
    owner, entry = compat.availability_owner(), compat.registered_muon()  # what raises has changed nothing
    if not _had_emerging_optimizers:
        _had_emerging_optimizers.append(owner.HAVE_EMERGING_OPTIMIZERS)
        owner.HAVE_EMERGING_OPTIMIZERS = True
    if entry is None:
        patching.replace_symbol(_NATIVE, DitronTensorParallelMuon)
    else:
        patching.replace_entry(entry, "optimizer_cls", DitronTensorParallelMuon)
    for native, fused in class_map().items():
        patching.redirect_construction(native, fused)


def stop() -> None:
    """Takes back what `start` set; `patching.undo_all` takes back the classes."""
    if _had_emerging_optimizers:
        compat.availability_owner().HAVE_EMERGING_OPTIMIZERS = _had_emerging_optimizers.pop()


def unsupported_reason_muon(mode: str, coefficient_type: str) -> str | None:
    """Why Megatron's own optimizer steps the matrices, or None."""
    if mode == "distributed":
        return "--muon-tp-mode distributed is another algorithm"
    if coefficient_type not in _NATIVE_COEFFICIENTS:
        return f"coefficients {coefficient_type!r} are emerging_optimizers' own"
    return None


def unsupported_reason_matrix(param: torch.Tensor) -> str | None:
    """Why Megatron's own optimizer steps a parameter, or None."""
    if param.dim() != 2:
        return f"a parameter has shape {tuple(param.shape)}, Muon takes matrices"
    return unsupported_reason_weight(param)


class _OrNative(type):
    """Of a class whose constructor builds Megatron's own optimizer for what `Muon` does not support."""

    def __call__(cls, params: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        given = list(params)
        for group in given:
            if isinstance(group, dict) and not isinstance(group["params"], (torch.Tensor, set)):
                group["params"] = list(group["params"])  # as torch does: a generator is read once
        copies = [dict(one) if isinstance(one, dict) else one for one in given]  # optimizers write into their groups
        try:
            _check_libraries(given)
            return super().__call__(given, *args, **compat.common_arguments(kwargs))
        except NotSupportedError as error:
            if compat.muon_module().OrthogonalizedOptimizer is object:
                raise NotSupportedError(
                    f"{error}, and Megatron's own optimizer needs emerging_optimizers, which is not installed"
                ) from None
            log_once(f"native muon {error}", f"muon: native, {error}")
        return _NATIVE(copies, *args, **kwargs)


def _check_libraries(given: list[Any]) -> None:
    """Raises NotSupportedError if kernels must not run because a library is of an untried version."""
    listed = (param for one in given for param in (one["params"] if isinstance(one, dict) else [one]))
    first = next((param for param in listed if isinstance(param, torch.Tensor)), None)
    if first is not None and (first.is_cuda or is_interpreter()):
        reason = self_check(None, first.device)
        if reason is not None:
            raise NotSupportedError(reason)


@outside_compile
class DitronTensorParallelMuon(Muon, metaclass=_OrNative):
    """`Muon` with the constructor of Megatron's ``TensorParallelMuon``, by any version's names of its arguments.

    Every parameter takes Muon, as natively. What is not supported (``mode="distributed"``, which is another algorithm;
    coefficients that `Muon` does not have, ...) builds Megatron's own optimizer, with one log line.

    Args: as there. ``mode`` is Megatron's ``--muon-tp-mode``.

    Raises:
        ValueError: Less than one Newton-Schulz step, in Megatron's words.
        NotSupportedError: What is not supported, if ``emerging_optimizers`` is not installed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        momentum_beta: float = 0.95,
        use_nesterov: bool = True,
        weight_decay: float = 0.01,
        use_decoupled_weight_decay: bool = True,
        split_qkv: bool = False,
        is_qkv_fn: Callable[[torch.Tensor], bool] | None = None,
        qkv_split_shapes: tuple[int, int, int] | None = None,
        fp32_matmul_prec: str = "medium",
        coefficient_type: str = "quintic",
        num_ns_steps: int = 5,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        pg_collection: Any = None,
        mode: str = "duplicated",
    ) -> None:
        if num_ns_steps < 1:
            raise ValueError(f"num_ns_steps must be at least 1, got {num_ns_steps}")
        reason = unsupported_reason_muon(mode, coefficient_type)
        if reason is not None:
            raise NotSupportedError(reason)
        self.pg_collection = pg_collection
        super().__init__(
            params,
            lr,
            momentum_beta,
            use_nesterov,
            weight_decay,
            weight_decay_method="decoupled" if use_decoupled_weight_decay else "l2",
            fp32_matmul_prec=fp32_matmul_prec,
            coefficient_type=cast(CoefficientType, coefficient_type),
            num_ns_steps=num_ns_steps,
            scale_mode=cast(ScaleMode, scale_mode),  # which checks it, as the other words
            extra_scale_factor=extra_scale_factor,
            split_qkv=split_qkv,
            is_qkv_fn=is_qkv_fn,
            qkv_split_shapes=qkv_split_shapes,
            tp_mode=cast(TensorParallelMode, mode),
            tp_group_fn=self._tp_group,
            eps=compat.norm_eps(),
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `Muon`; the group then names what native's would, which is also what checkpoints hold."""
        param_group.setdefault(compat.momentum_key(), param_group.get("momentum_beta", self.defaults["momentum_beta"]))
        super().add_param_group(param_group)
        self._name_as_natively(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by ``load_state_dict``: the momentum's factor comes from Megatron's name of it, and what
        Megatron keeps outside of groups is this job's, whatever the checkpoint's had."""
        for group in state["param_groups"]:
            for name in ("momentum", "momentum_beta"):  # as other versions of emerging_optimizers call it
                if name != compat.momentum_key() and name in group:
                    group.setdefault(compat.momentum_key(), group.pop(name))
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault(compat.momentum_key(), group["momentum_beta"])
            self._name_as_natively(group)

    def _name_as_natively(self, group: dict[str, Any]) -> None:
        for name in set(self.defaults) - {"lr", "weight_decay", compat.momentum_key()}:
            group.pop(name, None)

    def _value(self, group: dict[str, Any], name: str) -> Any:
        """Natively all but the momentum's factor is outside of groups, the same for all of them."""
        return group[compat.momentum_key()] if name == "momentum_beta" else self.defaults[name]

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        """Makes the state of a group, as Megatron asks before it loads a checkpoint."""
        for param in group["params"]:
            if not self.state[param] and not (skip_non_grad_params and param.grad is None):
                self.state[param]["momentum_buffer"] = torch.zeros_like(param.data)

    def _qkv_rows(self, param: torch.Tensor) -> tuple[int, ...] | None:
        """Since 0.19 a weight may say itself how it is split."""
        rows = super()._qkv_rows(param)
        own = getattr(param, "qkv_split_shapes", None)
        return rows if rows is None or own is None else tuple(own)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        for param in group["params"]:
            reason = unsupported_reason_matrix(param)
            if reason is not None:
                raise NotSupportedError(reason)

    def _algorithm(self, group: dict[str, Any], param: torch.Tensor) -> str:
        return "muon"

    def _tp_group(self, param: torch.Tensor) -> dist.ProcessGroup | None:
        """Tensor-parallel group of a weight: experts have their own."""
        if self.pg_collection is None:
            return None
        return self.pg_collection.expt_tp if getattr(param, "expert_tp", False) else self.pg_collection.tp


@outside_compile
class DitronLayerWiseDistributedOptimizer(
    native_layer_wise.LayerWiseDistributedOptimizer,
    metaclass=EqualsBaseClass,
    native=native_layer_wise.LayerWiseDistributedOptimizer,
):
    """Layer-wise sharding that sends each matrix as soon as it is stepped, while the next ones are computed.

    Native gathers everything at the end into buffers of the model's size. Who owns what is native's choice if
    gradients are clipped, since the norm they are clipped by sums owner by owner, and if checkpoints have a file of
    each rank (``--ckpt-format torch``), which belongs to the sharding that wrote it; elsewhere matrices are dealt out
    by the cost of their step (``DITRON_MUON_SHARDING``). ``torch_dist`` checkpoints do not depend on it.

    Matrices of experts, which have a group of their own, are sent when all others are: collectives of two groups must
    come in one order on every rank.
    """

    def __init__(
        self,
        optimizers: list[Any],
        config: Any,
        pg_collection: Any = None,
        init_state_fn_list: list[Any] | None = None,
        **kwargs: Any,  # of newer versions: model_chunks, async_allgather
    ) -> None:
        self._clips_gradients = config.clip_grad > 0
        self._native_because = compat.unsupported_reason_layer_wise(config, kwargs)
        super().__init__(optimizers, config, pg_collection, init_state_fn_list, **kwargs)
        self._rounds: list[tuple[LayerShards, list[list[torch.Tensor]], dist.ProcessGroup]] = []
        self._model_of: dict[int, torch.Tensor] = {}
        if self._native_because is not None:
            log_once(
                f"dist_muon native {self._native_because}", f"dist_muon: sent by Megatron, {self._native_because}"
            )
            return
        if self.pg_collection is None or not self.dp_cp_params_list:  # one data parallel rank: nobody to send to
            return
        for optimizer in self.chained_optimizers:
            muon = getattr(optimizer, "optimizer", optimizer)
            if isinstance(muon, Muon):
                muon.after_matrix = self._send_matrix
                self._map_model_params(optimizer)
        self._plan_rounds(self.dp_cp_params_list, self.pg_collection.dp_cp)
        self._plan_rounds(self.expt_dp_params_list, self.pg_collection.expt_dp)

    def shard_params(self, optimizers: list[Any], *args: Any, **kwargs: Any) -> None:
        """Deals the parameters of all optimizers out to ranks and keeps the own ones in the groups.

        ``args``: since 0.18 the layout of the buffers, None if this package deals."""
        if self._native_because is not None:
            super().shard_params(optimizers, *args, **kwargs)
            return
        # in bf16 native wraps optimizers for fp32 copies only after this
        groups = [
            (group, isinstance(getattr(o, "optimizer", o), Muon)) for o in optimizers for group in o.param_groups
        ]
        self._group_of = {id(param): index for index, (group, _) in enumerate(groups) for param in group["params"]}
        self._matrix_ids = {id(param) for group, is_muon in groups if is_muon for param in group["params"]}
        is_expert = [group.get("is_expert_parallel", False) for group, _ in groups]
        self._dense_ids = {key for key, index in self._group_of.items() if not is_expert[index]}
        by_cost = False
        if self._matrix_ids and self.pg_collection.dp_cp.size() > 1:
            choice = get_settings().muon_sharding
            by_cost = choice == "cost" or (
                choice == "auto" and not self._clips_gradients and not compat.has_file_per_rank()
            )
            words = "by cost" if by_cost else "as megatron-core does"
            log_once("dist_muon sharding", f"dist_muon: matrices dealt out {words}")
        if by_cost:
            self._shard_by_cost([group for group, _ in groups], is_expert)
        else:
            super().shard_params(optimizers, *args, **kwargs)

    def _shard_by_cost(self, groups: list[dict[str, Any]], is_expert: list[bool]) -> None:
        """Native's result (lists of every rank's parameters, own ones in the groups), balanced by cost."""
        self.dp_cp_params_list = self.expt_dp_params_list = None
        dp_cp, expt_dp = self.pg_collection.dp_cp, self.pg_collection.expt_dp
        params = [(param, index) for index, group in enumerate(groups) for param in group["params"]]
        self.dp_cp_params_list, own = self._deal([p for p in params if not is_expert[p[1]]], dp_cp)
        experts = [p for p in params if is_expert[p[1]]]
        if experts:
            self.expt_dp_params_list, own_experts = self._deal(experts, expt_dp)
            own = own + own_experts
        for index, group in enumerate(groups):
            group["params"] = [param for param, of_group in own if of_group == index]
        if expt_dp.size() == 1:
            self.expt_dp_params_list = None

    def _deal(
        self, params: list[tuple[torch.Tensor, int]], group: dist.ProcessGroup
    ) -> tuple[list[list[torch.Tensor]], list[tuple[torch.Tensor, int]]]:
        """(parameters of each rank, own parameters with their group), in the order in which each rank steps them."""
        costs = [
            newton_schulz_cost(*param.shape) if id(param) in self._matrix_ids else 3000.0 * param.numel()
            for param, _ in params
        ]
        shards = [sorted(shard, key=lambda i: params[i][1]) for shard in shard_by_cost(costs, group.size())]
        return [[params[i][0] for i in shard] for shard in shards], [params[i] for i in shards[group.rank()]]

    def _map_model_params(self, optimizer: Any) -> None:
        """Finds the model's parameter of each parameter that Muon steps: itself, or the bf16 one of an fp32 copy."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._model_of[id(param)] = param
        pairs = zip(getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ()))
        for model_params, main_params in pairs:
            for model_param, main_param in zip(model_params, main_params):
                self._model_of[id(main_param)] = model_param

    def _plan_rounds(self, params_of_rank: list[list[torch.Tensor]] | None, group: dist.ProcessGroup) -> None:
        if not params_of_rank:
            return
        # in the order in which Muon takes them: group by group
        matrices = [
            sorted((p for p in params if id(p) in self._matrix_ids), key=lambda p: self._group_of[id(p)])
            for params in params_of_rank
        ]
        flat = [p for params in matrices for p in params]
        starts = [sum(len(params) for params in matrices[:rank]) for rank in range(len(matrices))]
        rounds = LayerShards(flat, [range(s, s + len(params)) for s, params in zip(starts, matrices)], group)
        rest = [[p for p in params if id(p) not in self._matrix_ids] for params in params_of_rank]
        self._rounds.append((rounds, rest, group))

    @torch.no_grad()
    def _send_matrix(self, main_param: torch.Tensor) -> None:
        """After Muon stepped a matrix: its round. (The wrapper copies main to model again later: the same values.)"""
        model_param = self._model_of[id(main_param)]
        if id(model_param) not in self._dense_ids:
            return
        if model_param is not main_param:
            model_param.data.copy_(main_param)
        self._rounds[0][0].send_round()

    @torch.no_grad()
    def allgather_params(self) -> None:
        """Sends what the step has not sent yet, and makes the current stream wait for all of it."""
        if self._native_because is not None:
            super().allgather_params()
        for rounds, rest, group in self._rounds:
            rounds.send_remaining()
            _broadcast_all(rest, group)
            rounds.finish()


def _broadcast_all(params_of_rank: list[list[torch.Tensor]], group: dist.ProcessGroup) -> None:
    """Each rank's parameters to all: large ones by themselves, small ones in one flat buffer a rank and type."""
    sent: list[tuple[torch.Tensor, int]] = []
    unpacking = []
    for rank, params in enumerate(params_of_rank):
        small: dict[torch.dtype, list[torch.Tensor]] = {}
        for param in params:
            if param.numel() >= _SMALL_ELEMENTS:
                sent.append((param.data, rank))
            elif param.numel():
                small.setdefault(param.dtype, []).append(param.data)
        for tensors in small.values():
            flat = _flatten_dense_tensors(tensors)
            sent.append((flat, rank))
            if rank != group.rank():
                unpacking.append((flat, tensors))
    for work in broadcast_together(sent, group):
        work.wait()
    for flat, tensors in unpacking:
        for received, tensor in zip(_unflatten_dense_tensors(flat, tensors), tensors):
            tensor.copy_(received)
