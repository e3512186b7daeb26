"""Repairs Triton's interpreter so that CPU tests can trust what it computes.

What is wrong in Triton 3.6 without this module:

- bf16 lives in NumPy ``uint16`` arrays, and arithmetic, casts to and from integers, fp16 and
  fp64, and ``tl.dot`` work on those bits as if they were integers; casts from fp32 truncate.
- fp32 to fp16 with an explicit rounding mode rounds half away from zero.
- the smallest numbers of FP8 are other ones in ``tl.dot``; here products are exact, and sums in fp32.
- with NumPy >= 2.4 a one-element array no longer converts to an index, so ``range()`` over a
  Triton scalar raises.
- every launch and every call of a device function patches ``triton.language`` anew, half a
  millisecond each.
- every integer sum and product is computed again in 64 bits, for an overflow check that is then
  not made (it needs debug mode), and a table of all types is built whenever one is looked up:
  more than half of the time of an integer operation.
- the shape of every value is wrapped, checked and spelled out anew, and all names of
  ``triton.language`` are listed at every launch: a third of what is left.

Every bf16 operation is done here as the hardware does it: exact conversion to fp32, the
operation in fp32, one rounding to nearest even.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

_MARK = "_ditron_interpreter_repairs"


def bf16_bits_to_fp32(bits: np.ndarray) -> np.ndarray:
    """Value of bf16 bit patterns (``uint16``, any shape) as fp32; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp32_to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """Nearest bf16 (ties to even, NaN stays NaN) of fp32 ``values``, as ``uint16`` bit patterns."""
    values = np.asarray(values, dtype=np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits.astype(np.uint64) + rounding) >> np.uint64(16)).astype(np.uint16)
    quiet_nan = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return np.where(np.isnan(values), quiet_nan, rounded)


def fp32_to_fp8_bits(values: np.ndarray, name: str) -> np.ndarray:
    """The bytes of fp32 `values` in that type of torch, rounded to nearest even; what is beyond its largest number
    becomes that, as GPUs' conversions have it."""
    import torch

    dtype = getattr(torch, name)
    largest = torch.finfo(dtype).max
    clipped = torch.from_numpy(np.clip(values, -largest, largest))
    found: np.ndarray = clipped.to(dtype).view(torch.uint8).numpy()
    return found


def is_installed() -> bool:
    """Whether `install` has repaired the interpreter of this process."""
    import triton.runtime.interpreter as interpreter

    return hasattr(interpreter, _MARK)


def install() -> None:
    """Repair the interpreter of this process. Idempotent; changes nothing in compiled kernels."""
    import triton.runtime.interpreter as interpreter

    if is_installed():
        return
    _repair_casts(interpreter)
    _repair_arithmetic(interpreter)
    _repair_scalars(interpreter)
    _repair_patching(interpreter)
    _leave_out_unused_work(interpreter)
    _remember_shapes()
    _remember_builtins(interpreter)
    _lend_exponential(interpreter)
    setattr(interpreter, _MARK, True)


def _lend_exponential(interpreter: Any) -> None:
    """CUDA's ``expf`` has no code in the interpreter: torch's stands for it, whose bits the native path has there."""
    import torch
    import triton.language as tl
    from triton.language.extra import libdevice

    def exponential(values: Any) -> Any:
        found = torch.from_numpy(np.ascontiguousarray(values.handle.data)).exp().numpy()
        return tl.tensor(interpreter.TensorHandle(found, values.handle.dtype), values.type)

    libdevice.exp = exponential


def _is_bf16(handle: Any) -> bool:
    import triton.language as tl

    return handle.dtype.scalar.name == tl.bfloat16.name


def _widen(interpreter: Any, handle: Any) -> Any:
    """`handle` itself, or its fp32 value when it holds bf16."""
    import triton.language as tl

    if not _is_bf16(handle):
        return handle
    return interpreter.TensorHandle(bf16_bits_to_fp32(handle.data), tl.float32)


def _widen_fp8(interpreter: Any, handle: Any) -> Any:
    """`handle` itself, or its fp32 value when it holds FP8."""
    import triton.language as tl

    types = {tl.float8e4nv.name: "float8_e4m3fn", tl.float8e5.name: "float8_e5m2"}
    name = types.get(handle.dtype.scalar.name)
    if name is None:
        return handle
    return interpreter.TensorHandle(_fp8_values(name)[handle.data], tl.float32)


def as_fp32(handle: Any) -> np.ndarray:
    """The value of a floating-point `handle`, bf16 and FP8 included, as fp32."""
    import triton.runtime.interpreter as interpreter

    values: np.ndarray = _widen(interpreter, _widen_fp8(interpreter, handle)).data.astype(np.float32)
    return values


@functools.cache
def _fp8_values(name: str) -> np.ndarray:
    """The fp32 value of each byte as that type of torch."""
    import torch

    values: np.ndarray = torch.arange(256, dtype=torch.uint8, device="cpu").view(getattr(torch, name)).float().numpy()
    return values


def _narrow(interpreter: Any, values: np.ndarray) -> Any:
    """A bf16 handle of fp32 `values`; the outcome of a comparison (bool) becomes an int1 handle."""
    import triton.language as tl

    if values.dtype == np.bool_:
        return interpreter.TensorHandle(values, tl.int1)
    return interpreter.TensorHandle(fp32_to_bf16_bits(values), tl.bfloat16)


def _repair_casts(interpreter: Any) -> None:
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    native_cast, native_convert = builder.cast_impl, interpreter._convert_float

    def cast(self: Any, source: Any, target_type: Any) -> Any:
        target = target_type.scalar
        if not _is_bf16(source) and target != tl.bfloat16:
            return native_cast(self, source, target_type)
        values = _widen(interpreter, source).data
        if target == tl.bfloat16:
            return _narrow(interpreter, values.astype(np.float32))
        return interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(target)), target)

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        truncates = rounding_mode is not None and rounding_mode != interpreter._ir.ROUNDING_MODE.RTNE
        ieee = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}
        known = (*ieee, tl.bfloat16)
        fp8 = {tl.float8e4nv: "float8_e4m3fn", tl.float8e5: "float8_e5m2"}
        if truncates or source not in known or target not in (*known, *fp8):
            return native_convert(data, source, target, rounding_mode)
        values = bf16_bits_to_fp32(data) if source == tl.bfloat16 else data
        if target in fp8:
            return fp32_to_fp8_bits(values.astype(np.float32), fp8[target])
        if target == tl.bfloat16:
            return fp32_to_bf16_bits(values.astype(np.float32))
        with np.errstate(over="ignore"):
            return values.astype(ieee[target])

    builder.cast_impl, interpreter._convert_float = cast, convert_float


def _repair_arithmetic(interpreter: Any) -> None:
    builder = interpreter.InterpreterBuilder
    native_binary, native_unary = builder.binary_op, builder.unary_op
    native_ternary, native_fma, native_dot = builder.ternary_op, builder.create_fma, builder.create_dot
    native_rsqrt = builder.create_rsqrt

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., np.ndarray]) -> Any:
        if not _is_bf16(lhs):
            return native_binary(self, lhs, rhs, op)
        return _narrow(interpreter, op(_widen(interpreter, lhs).data, _widen(interpreter, rhs).data))

    def unary_op(self: Any, arg: Any, op: Callable[..., np.ndarray]) -> Any:
        if not _is_bf16(arg):
            return native_unary(self, arg, op)
        return _narrow(interpreter, op(_widen(interpreter, arg).data))

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Callable[..., np.ndarray]) -> Any:
        if not _is_bf16(other) or op is np.where:  # a selection moves bits and needs no arithmetic
            return native_ternary(self, lhs, rhs, other, op)
        wide = (_widen(interpreter, handle).data for handle in (lhs, rhs, other))
        return _narrow(interpreter, op(*wide))

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_bf16(z):
            return native_fma(self, x, y, z)
        # The product of two bf16 is exact in fp32, so one rounding happens twice only in the sum.
        wide_x, wide_y, wide_z = (_widen(interpreter, handle).data for handle in (x, y, z))
        return _narrow(interpreter, wide_x * wide_y + wide_z)

    def rsqrt(self: Any, arg: Any) -> Any:
        if not _is_bf16(arg):
            return native_rsqrt(self, arg)
        return _narrow(interpreter, 1 / np.sqrt(_widen(interpreter, arg).data))

    def dot(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        a, b = (_widen(interpreter, _widen_fp8(interpreter, operand)) for operand in (a, b))
        return native_dot(self, a, b, accumulator, *rest)

    builder.binary_op, builder.unary_op, builder.ternary_op = binary_op, unary_op, ternary_op
    builder.create_fma, builder.create_rsqrt, builder.create_dot = fma, rsqrt, dot


def _repair_scalars(interpreter: Any) -> None:
    builder = interpreter.InterpreterBuilder
    native_patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        native_patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    def get_bf16(self: Any, value: float) -> Any:
        return _narrow(interpreter, np.array([value], dtype=np.float32))

    interpreter._patch_lang_tensor = patch_tensor
    builder.get_bf16 = get_bf16


def _repair_patching(interpreter: Any) -> None:
    """Patches ``triton.language`` once per process: its own functions have no use when kernels are interpreted."""
    import triton.language as tl

    native_patch, no_patches = interpreter._patch_lang, interpreter._LangPatchScope
    visible_in: dict[int, frozenset[int]] = {}  # by id of a module's globals, which live as long as the module
    patched: set[int] = set()

    def patch_lang(fn: Any) -> Any:
        key = id(fn.__globals__)
        if key not in visible_in:
            visible_in[key] = frozenset(map(id, fn.__globals__.values())) & {id(tl), id(tl.core)}
        if not visible_in[key] or not visible_in[key] <= patched:
            native_patch(fn)
            patched.update(visible_in[key])
        return no_patches()

    interpreter._patch_lang = patch_lang


def _leave_out_unused_work(interpreter: Any) -> None:
    builder, native_np_dtype = interpreter.interpreter_builder, interpreter._get_np_dtype
    known: dict[str, np.dtype] = {}

    def get_np_dtype(tt_dtype: Any) -> np.dtype:
        scalar = tt_dtype.scalar
        if scalar.is_ptr():
            return native_np_dtype(scalar)
        if scalar.name not in known:
            known[scalar.name] = native_np_dtype(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = get_np_dtype
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _remember_shapes() -> None:
    """Values of one shape share what says so; the name of a tuple's type is made when it is asked for."""
    from triton.language import core

    native_block = core.block_type.__init__
    blocks: dict[tuple[int, ...], tuple[Any, int]] = {}
    values: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key not in blocks:
            native_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = blocks[key]
        self.name = f"<{key}, {element_ty.name}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in values:
            values[key] = core.tuple([core.constexpr(size) for size in key]), core.constexpr(math.prod(key))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = values[key]

    def tuple_type(self: Any, types: Any, fields: Any = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def name_of_tuple_type(self: Any) -> str:
        return "[" + ",".join(f"{field}:{type}" for field, type in zip(self.fields, self.types)) + "]"

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core.tuple_type.__init__, core.tuple_type.name = tuple_type, property(name_of_tuple_type)


def _remember_builtins(interpreter: Any) -> None:
    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)

    def interpreted(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)  # what is around it asks for a semantic, and there is one

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    patch_builtins(interpreter, interpreted)


def patch_builtins(interpreter: Any, wrapped: Callable[[Any], Any]) -> None:
    """Has kernels find Triton's functions as ``wrapped``, which is called once for each."""
    from triton.language import core

    # By id of a module or class, all of which live as long as the process.
    builtins: dict[int, list[tuple[str, Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        key = id(package)
        if key not in builtins:
            found = inspect.getmembers(package, core.is_builtin)
            builtins[key] = [(name, wrapped(member)) for name, member in found]
        for name, member in builtins[key]:
            scope.set_attr(package, name, member)

    interpreter._patch_builtin = patch_builtin
