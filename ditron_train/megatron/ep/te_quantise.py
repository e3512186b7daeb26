"""Rows of Transformer Engine's experts in FP8 with a scale an expert (current scaling), quantised all at once (part of
feature ``ep``).

Transformer Engine takes four kernels and three allocations an expert: it clears a maximum, finds it, divides and
casts. The fused path takes four kernels for all experts: it lists tiles, clears maxima, finds them and casts. It
leaves the quantizers' numbers as Transformer Engine does. The code of Transformer Engine's ``GroupedLinear`` runs in a
copy in which the function that quantises is replaced; its products, and what it keeps for backward, stay Transformer
Engine's. Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Tensor

from ditron_train.ep.grouped_quantization import quantised_rows
from ditron_train.megatron.shared.other_names import called, rebind_globals
from ditron_train.policy import log_native
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile

#: What the log calls it.
LOG_NAME = "ep rows (FP8)"

_DTYPES = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
_ALIKE = ("dtype", "force_pow_2_scales", "amax_epsilon", "internal")
_READ = ("with_amax_reduction", *_ALIKE[1:])
_KNOWN = {"disable_bulk_allocation"}  # options that are off if nothing is offloaded, from 2.12 on


class RowsKind(NamedTuple):
    """Rows that are quantised alike.

    Attributes:
        columns: Of a row.
        fp8_format: ``E4M3`` or ``E5M2``.
        power_of_2: Whether scales are powers of two.
        epsilon: What amax is at least.
    """

    columns: int
    fp8_format: str
    power_of_2: bool
    epsilon: float


_NO_KINDS: frozenset[RowsKind] = frozenset()
_active: ContextVar[frozenset[RowsKind]] = ContextVar("ditron_train_grouped_quantization", default=_NO_KINDS)


def quantise(rows: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Any]) -> list[Any]:
    """``tex.split_quantize``: the rows of each expert in FP8, with their transposes, and the quantizers' numbers.

    Raises:
        NotSupportedError: They are not covered; nothing was launched.
    """
    first = quantizers[0]
    reason = _unsupported_reason(rows, quantizers)
    if reason is not None:
        raise NotSupportedError(reason)
    rule: dict[str, Any] = dict(epsilon=first.amax_epsilon, power_of_2=first.force_pow_2_scales)
    # Until 2.15.
    kept = [(quantizer.amax, quantizer.scale) for quantizer in quantizers] if hasattr(first, "amax") else None
    made = quantised_rows(rows.contiguous(), splits, kept, _DTYPES[first.dtype.name], **rule)
    return [_tensor(*parts) for parts in zip(quantizers, *made, strict=True)]


def _tensor(quantizer: Any, data: torch.Tensor, transpose: torch.Tensor, inverse: torch.Tensor) -> Any:
    fields: dict[str, Any] = dict(data=data, data_transpose=transpose, fp8_scale_inv=inverse)
    fields.update(fp8_dtype=quantizer.dtype, quantizer=quantizer)
    if quantizer.internal:  # no tensor; its class has another name in each version
        storage = Float8Tensor.__bases__[0]
        return storage(**fields, **({"fake_dtype": torch.bfloat16} if _knows_its_type(storage) else {}))
    return Float8Tensor(shape=data.shape, dtype=torch.bfloat16, **fields)


@cache
def _knows_its_type(storage: type) -> bool:
    """From 2.14 on what is no tensor says of which type it stands for one."""
    return "fake_dtype" in inspect.signature(storage.__new__).parameters


def unsupported_reason_quantizers(device: torch.device) -> str | None:
    """Why Transformer Engine's quantizers of current scaling are of another build, or None."""
    made = new_quantizer(RowsKind(0, "E4M3", True, 0.0), device)
    wanted = *_READ, *(("amax", "scale") if hasattr(made, "amax") or hasattr(made, "scale") else ())
    missing = [name for name in wanted if not hasattr(made, name)]
    return f"this version's quantizers have no {', '.join(missing)}" if missing else None


def new_quantizer(kind: RowsKind, device: torch.device) -> Any:
    """Transformer Engine's quantizer of such rows."""
    dtype = getattr(tex.DType, f"kFloat8{kind.fp8_format}")
    options: dict[str, Any] = dict(columnwise=True, force_pow_2_scales=kind.power_of_2, amax_epsilon=kind.epsilon)
    return Float8CurrentScalingQuantizer(dtype, device, **options)


def _unsupported_reason(rows: torch.Tensor, quantizers: Sequence[Any]) -> str | None:
    first = quantizers[0]
    if rows.dim() != 2 or rows.dtype != torch.bfloat16:
        return f"rows of {rows.dtype} in {rows.dim()} dimensions are not covered"
    if any(type(quantizer) is not Float8CurrentScalingQuantizer for quantizer in quantizers):
        return "rows have quantizers of another kind"
    if any(getattr(quantizer, name) != getattr(first, name) for quantizer in quantizers for name in _ALIKE):
        return "experts have quantizers that differ"
    if not all(quantizer.rowwise_usage and quantizer.columnwise_usage for quantizer in quantizers):
        return "rows are wanted without their transposes"
    if any(
        quantizer.with_amax_reduction or getattr(quantizer, "use_existing_amax", False) for quantizer in quantizers
    ):
        return "amax comes from elsewhere"
    return None


class Quantising:
    """``transformer_engine_torch`` as Transformer Engine's code calls it, with the fused path for rows of some
    kinds."""

    def __init__(self, kinds: frozenset[RowsKind]) -> None:
        self._kinds = kinds

    def __getattr__(self, name: str) -> Any:
        return getattr(tex, name)

    def split_quantize(self, rows: Any, splits: Any, quantizers: Any, *args: Any, **options: Any) -> Any:
        """See ``quantise``; Transformer Engine's own if that is not covered."""
        if quantizers and _kind_of(rows, quantizers[0]) in self._kinds:
            try:
                if args or any(options.values()) or options.keys() - _KNOWN:
                    raise NotSupportedError(f"rows are quantised with options: {', '.join(options) or 'unnamed'}")
                return quantise(rows, splits, quantizers)
            except NotSupportedError as error:
                log_native(LOG_NAME, str(error))
        return tex.split_quantize(rows, splits, quantizers, *args, **options)


def _kind_of(rows: Any, quantizer: Any) -> RowsKind | None:
    if type(quantizer) is not Float8CurrentScalingQuantizer:
        return None
    fp8_format = quantizer.dtype.name.removeprefix("kFloat8")
    return RowsKind(rows.shape[-1], fp8_format, quantizer.force_pow_2_scales, quantizer.amax_epsilon)


@contextlib.contextmanager
def grouped_quantization(kinds: frozenset[RowsKind]) -> Iterator[None]:
    """Inside, the forward of a layer on ``grouped_base``, and its backward later, quantise rows of these kinds for all
    experts at once."""
    token = _active.set(kinds)
    try:
        yield
    finally:
        _active.reset(token)


def _module() -> Any:
    return importlib.import_module("transformer_engine.pytorch.module.grouped_linear")


@cache
def unsupported_reason_code() -> str | None:
    """Why the code of Transformer Engine's ``GroupedLinear`` cannot quantise by another function, or None."""
    native = _module()
    passes = getattr(native, "_GroupedLinear", None)
    if passes is None:
        return "this version of Transformer Engine has experts of another build"
    if "_GroupedLinear" not in called(native.GroupedLinear.forward):
        return "this version of Transformer Engine does not call _GroupedLinear"
    if all("split_quantize" in called(code) for code in (passes.forward, passes.backward)):
        return None
    return "this version of Transformer Engine quantises rows by functions of another module"


@cache
def _forward(kinds: frozenset[RowsKind]) -> Any:
    """The forward of ``GroupedLinear`` with an autograd function whose code is the native one's."""
    native = _module()
    names = {"tex": Quantising(kinds)}
    passes = {
        name: staticmethod(rebind_globals(getattr(native._GroupedLinear, name), names))
        for name in ("forward", "backward")
    }
    made = type("GroupedQuantization", (native._GroupedLinear,), passes)
    return rebind_globals(native.GroupedLinear.forward, {"_GroupedLinear": outside_compile(made)})


def grouped_base() -> type:
    """A base class for subclasses of megatron-core's grouped linear layers: listed after Megatron's layer, it is
    called between Megatron's forward and Transformer Engine's."""
    native = _module().GroupedLinear

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        kinds = _active.get()
        return (_forward(kinds) if kinds else native.forward)(self, *args, **kwargs)

    return type("GroupedQuantizationLinear", (native,), {"forward": forward, "__module__": native.__module__})
