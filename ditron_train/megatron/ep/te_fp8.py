"""Transformer Engine's experts in FP8: the forward products of a layer, or the gradients of its rows, in one kernel
(part of feature ``ep``).

Quantizers, what is kept for backward and gradients of weights are left to Transformer Engine: the code of its own
``GroupedLinear`` runs, in a copy in which the functions that multiply and quantise (``te_quantise``) are replaced. The
first gets what was quantised, wherever that lies, and multiplies all experts at once where each has rows enough for
cuBLAS's usual order of sums.
Covered are recipes with one scale a tensor. With blocks of scales a Triton kernel was slower than Transformer Engine's
calls, and not equal at every shape (docs/measurements/fp8.md).
Imported only where Transformer Engine is installed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import transformer_engine_torch as tex

from ditron_train.ep.group_gemm_fp8 import ExpertRows, group_gemm_fp8
from ditron_train.megatron.ep.te_quantise import Quantising, RowsKind
from ditron_train.megatron.shared.other_names import called, with_names
from ditron_train.policy import log_native
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile

#: What the log calls these products.
LOG_NAME = "ep experts (FP8)"

#: A layer's products: of its rows and weights, and of the gradients of its results and weights.
ExpertProduct = Literal["forward", "dgrad"]

_LAYOUTS: dict[str, ExpertProduct] = {"TN": "forward", "NN": "dgrad"}
# Options of ``general_grouped_gemm`` that say nothing of the product, or what ``multiply`` is told.
_KNOWN = {"layout", "m_splits", "grad", "single_output", "use_split_accumulator", "out_dtype"}
_OFF = {"bias", "use_bias", "accumulate", "gelu", "D_dtype"}


class AtOnce(NamedTuple):
    """What a layer does for all experts at once.

    Attributes:
        products: That are one kernel, each with the rows that every expert must have for it.
        rows: Which are quantised so.
    """

    products: frozenset[tuple[ExpertProduct, int]] = frozenset()
    rows: frozenset[RowsKind] = frozenset()


NOTHING_AT_ONCE = AtOnce()
_active: ContextVar[AtOnce] = ContextVar("ditron_train_experts_at_once", default=NOTHING_AT_ONCE)


def multiply(
    product: ExpertProduct,
    weights: Sequence[Any],
    rows: Sequence[Any],
    out: torch.Tensor,
    *,
    split_accumulator: bool,
    fewest_rows: int,
) -> bool:
    """Puts the products of what Transformer Engine has quantised into ``out``; False where they have to be its own:
    where an expert has fewer than ``fewest_rows``, among others. The log says why, once for each reason."""
    try:
        if out.dtype != torch.bfloat16 or not out.is_contiguous():  # in words without its sizes, which change
            raise NotSupportedError(f"{product} into {out.dtype}, or into strides of another's")
        first, second = _operands("rows", rows, columnwise=False), _operands("weights", weights, product == "dgrad")
        if split_accumulator != (product == "dgrad"):
            raise NotSupportedError(f"{product} has {'a' if split_accumulator else 'no'} split accumulator")
        if not _are_many(first.data, fewest_rows):
            raise NotSupportedError(
                f"{product} of steps in which an expert has fewer than {fewest_rows} rows, or none has any"
            )
        group_gemm_fp8(first, second, out=out, split_accumulator=split_accumulator)
    except NotSupportedError as error:  # nothing was launched, and no other rank waits for it
        log_native(LOG_NAME, str(error))
        return False
    return True


def _are_many(rows: Sequence[torch.Tensor], fewest: int) -> bool:
    return min(filter(None, (one.shape[0] for one in rows)), default=-1) >= fewest


def _operands(which: str, side: Sequence[Any], columnwise: bool) -> ExpertRows:
    """Values and scales with the sum's index last.

    Raises:
        NotSupportedError: They are not there, or of several kinds.
    """
    values, scales, formats = [], [], set()
    name = "data_transpose" if columnwise else "data"
    for one in side:
        try:
            fields = one.get_metadata() if hasattr(one, "get_metadata") else {}
        except NotImplementedError:  # what debugging puts in an operand's place
            fields = {}
        value, scale = fields.get(name), fields.get("fp8_scale_inv")
        if value is None or scale is None or (columnwise and getattr(one, "_transpose_invalid", False)):
            raise NotSupportedError(
                f"the experts' {which} are not all in FP8 with one scale, as the product needs them"
            )
        values.append(value)
        scales.append(scale)
        formats.add(fields["fp8_dtype"])
    if len(formats) != 1:
        names = " and ".join(sorted(one.name.removeprefix("kFloat8") for one in formats))
        raise NotSupportedError(f"the experts' {which} are not of one FP8 format, but {names}")
    is_e4m3 = formats.pop() == tex.DType.kFloat8E4M3
    return ExpertRows(values, scales, torch.float8_e4m3fn if is_e4m3 else torch.float8_e5m2)


def _is_plain_product(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether ``general_grouped_gemm`` is asked, behind its operands, for products alone, side by side."""
    return (
        options.keys() <= _KNOWN | _OFF
        and not any(options.get(name) for name in _OFF - {"bias"})
        and not any(isinstance(one, list) and any(one) for one in args)  # quantizers of results, from 2.11 on
        and bool(options.get("single_output"))
    )


def _stand_in(products: frozenset[tuple[ExpertProduct, int]]) -> Any:
    """``general_grouped_gemm`` as Transformer Engine's code calls it, with one kernel for ``products``."""
    fewest_rows = dict(products)

    def general_grouped_gemm(weights: Any, rows: Any, out: list[torch.Tensor], *args: Any, **options: Any) -> Any:
        product = _LAYOUTS.get(options.get("layout", "TN"))
        if product in fewest_rows and _is_plain_product(args, options):
            splits, fewest = bool(options.get("use_split_accumulator")), fewest_rows[product]
            if multiply(product, weights, rows, out[0], split_accumulator=splits, fewest_rows=fewest):
                return out, options.get("bias"), None
        elif product in fewest_rows:
            log_native(LOG_NAME, f"{product} is asked for with more than a product, or in several results")
        return _module().general_grouped_gemm(weights, rows, out, *args, **options)

    return general_grouped_gemm


@contextlib.contextmanager
def doing_at_once(at_once: AtOnce) -> Iterator[None]:
    """Inside, the forward of a layer on ``grouped_base``, and its backward later, do this for all experts at once."""
    token = _active.set(at_once)
    try:
        yield
    finally:
        _active.reset(token)


def _module() -> Any:
    return importlib.import_module("transformer_engine.pytorch.module.grouped_linear")


@cache
def why_not_code() -> str | None:
    """Why the code of Transformer Engine's ``GroupedLinear`` cannot run with another function, or None."""
    native = _module()
    function = getattr(native, "_GroupedLinear", None)
    if function is None:
        return "this version of Transformer Engine has experts of another build"
    wanted = {
        native.GroupedLinear.forward: "_GroupedLinear",
        function.forward: "general_grouped_gemm",
        function.backward: "general_grouped_gemm",
    }
    missing = sorted({name for code, name in wanted.items() if name not in called(code)})
    return f"this version of Transformer Engine does not call {', '.join(missing)}" if missing else None


@cache
def why_not_quantised() -> str | None:
    """Why no other function can quantise rows in the code of Transformer Engine's ``GroupedLinear``, or None."""
    passes = _module()._GroupedLinear
    if all("split_quantize" in called(code) for code in (passes.forward, passes.backward)):
        return None
    return "this version of Transformer Engine quantises them by functions of another module"


@cache
def _forward(at_once: AtOnce) -> Any:
    """The forward of ``GroupedLinear`` with an autograd function whose code is the native one's."""
    native = _module()
    names: dict[str, Any] = {"general_grouped_gemm": _stand_in(at_once.products)}
    if at_once.rows:
        names["tex"] = Quantising(at_once.rows)
    passes = {
        name: staticmethod(with_names(getattr(native._GroupedLinear, name), names)) for name in ("forward", "backward")
    }
    made = type("GroupedAtOnce", (native._GroupedLinear,), passes)
    return with_names(native.GroupedLinear.forward, {"_GroupedLinear": outside_compile(made)})


def grouped_base() -> type:
    """What a subclass of megatron-core's grouped linear layers has behind it among its bases, so that it stands
    between their forward and Transformer Engine's."""
    native = _module().GroupedLinear

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        at_once = _active.get()
        return (native.forward if at_once == NOTHING_AT_ONCE else _forward(at_once))(self, *args, **kwargs)

    return type("GroupedAtOnceLinear", (native,), {"forward": forward, "__module__": native.__module__})
