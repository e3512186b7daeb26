"""Repeating one kernel launch cheaply.

Triton binds, specialises and hashes every argument at every launch, and compares the globals that a kernel read: 50 to
150 us of host time for a kernel with descriptors. A ``KernelLaunch`` goes that way once and then calls the compiled
kernel directly: what the specialisation depended on is remembered and compared.

That still encodes every descriptor and looks at every pointer. Who can name a launch by what its arguments depend on
(``key``: addresses and strides) calls ``repeat`` first: the arguments as the driver takes them are kept, and a launch
is one lookup and one call, which takes a third of the host's time for a whole op (``docs/measurements/runtime.md``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.triton_launcher import (
    CallRecorder,
    RecordedCall,
    compiled_kernel,
    has_launch_hooks,
    recorder_of,
)

# Of every kernel, since bits depend on it: a product and a sum become one instruction (Triton to 3.9 does it unasked).
COMPILE_OPTIONS = {"enable_fp_fusion": True}

_COMPILER_THREADS = 8

_MAX_KEPT = 256  # a specialised integer that differs from call to call would be kept for ever
_MAX_REPEATED = 4096  # of some 2 KB each; a training step comes by the same addresses again and again


def _specialization(
    arguments: tuple[Any, ...], any_value: frozenset[int] = frozenset(), by_alignment: bool = False
) -> tuple[Any, ...]:
    """What Triton specialises on: type and alignment of a tensor, types and blocks of a descriptor, values of integers
    (stricter than Triton: the value itself; of those at the places ``any_value`` the type), of a tuple what it does
    for the parts. Every argument adds its own entries, so that what one argument is cannot be read as another's.

    ``by_alignment``: of integers no more than Triton does, whether they are 1 or whole sixteens.
    """
    key: list[Any] = []
    for place, argument in enumerate(arguments):
        kind = type(argument)
        if kind is int and place not in any_value:
            key.append((_type_of(argument), argument == 1, argument % 16 == 0) if by_alignment else argument)
        elif kind is TensorDescriptor:
            key.append((kind, argument.base.dtype, *argument.block_shape))
        elif isinstance(argument, torch.Tensor):
            key += argument.dtype, argument.data_ptr() & 15
        elif isinstance(argument, tuple):
            key.append(_specialization(argument, by_alignment=by_alignment))
        else:
            key.append(_type_of(argument) if isinstance(argument, int) else kind)
    return tuple(key)


def _type_of(number: int) -> str:
    """That of the kernel's argument."""
    if isinstance(number, bool):
        return "u1"
    if -(1 << 31) <= number < 1 << 31:
        return "i32"
    return "i64" if number < 1 << 63 else "u64"


def as_constant(value: Any) -> Any:
    """A constant as a launch takes it: of a tuple each field for itself, but in the interpreter, which knows no
    ``tl.constexpr``."""
    return type(value)(*map(tl.constexpr, value)) if isinstance(value, tuple) and not is_interpreter() else value


class KernelLaunch:
    """One kernel with its grid and constants, launched again and again with arguments of one kind.

    What always travels together may be one argument, a ``NamedTuple``, whose fields the kernel reads by name. A tuple
    holds no descriptors, and no sizes that are not to be specialised on: Triton looks at ``do_not_specialize`` for
    whole arguments alone; those may change from launch to launch. A constant may be a ``NamedTuple`` or a frozen
    dataclass of constants.

    Args:
        kernel: A ``@triton.jit`` function whose constexpr parameters come last.
        num_programs: Size of the one-dimensional grid.
        constants: Values of the constexpr parameters, in the kernel's order.
        num_warps: As in a Triton launch.
        num_stages: As in a Triton launch.

    Attributes:
        is_shared: Whether calls of many sizes share it: integers count by what Triton specialises on alone then, and
            nothing is kept for ``repeat``.
    """

    def __init__(
        self, kernel: Any, num_programs: int, constants: dict[str, Any], *, num_warps: int = 4, num_stages: int = 3
    ) -> None:
        names = list(kernel.arg_names)
        assert names[len(names) - len(constants) :] == list(constants), f"{names} does not end with {list(constants)}"
        self._kernel = kernel
        self._num_programs = num_programs
        self._constants = constants
        self._options = {"num_warps": num_warps, "num_stages": num_stages, **COMPILE_OPTIONS}
        self._values = tuple(constants.values())
        parameters = enumerate(getattr(kernel, "params", ()))  # what is interpreted has none
        self._any_value = frozenset(place for place, one in parameters if getattr(one, "do_not_specialize", False))
        self._compiled: dict[tuple[Any, ...], tuple[Any, CallRecorder | None]] = {}
        self.is_shared = False
        self._repeated: dict[Hashable, RecordedCall] = {}

    def repeat(self, key: Hashable, stream: int) -> bool:
        """Launches on the stream of this handle what was launched with ``key`` before; False if that is not
        known."""
        kept = self._repeated.get(key)
        if kept is None:
            return False
        kept.launch(*kept.before, stream, *kept.after)
        return True

    def __call__(self, *arguments: Any, stream: torch.cuda.Stream | None = None, key: Hashable = None) -> None:
        """Launches on ``stream`` (default: the current stream of the current device).

        ``key``: says for ``repeat`` what these arguments are; everything that can differ between two calls must be in
            it.
        """
        # Compiled code is loaded on one device.
        specialization = (_current_device(), *_specialization(arguments, self._any_value, self.is_shared))
        known = self._compiled.get(specialization)
        if known is None:
            self._first(specialization, arguments, stream)
            return
        compiled, recorder = known
        handle = stream.cuda_stream if stream is not None else _current_stream()
        if key is not None and recorder is not None and not self.is_shared:
            call = recorder((*arguments, *self._values))
            if call is not None:
                if len(self._repeated) >= _MAX_REPEATED:
                    self._repeated.clear()
                self._repeated[key] = call
                call.launch(*call.before, handle, *call.after)
                return
        fixed = (self._num_programs, 1, 1, handle, compiled.function, compiled.packed_metadata, None, None, None)
        compiled.run(*fixed, *arguments, *self._values)

    def compile(self, *arguments: Any) -> None:
        """Compiles for such arguments without launching; inside ``compiled_together`` it does not wait for it."""
        if not is_interpreter():
            self._kernel.warmup(*arguments, grid=(self._num_programs,), **self._constants, **self._options)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Kernel, constants and options: launches with the same one run the same code, but for what Triton specialises
        on."""
        chosen = {name: value for name, value in self._options.items() if name not in COMPILE_OPTIONS}
        return (self._kernel.__name__, *self._constants.items(), *chosen.items())

    def _first(self, key: tuple[Any, ...], arguments: tuple[Any, ...], stream: torch.cuda.Stream | None) -> None:
        """The launch through Triton, which compiles; the interpreter takes it every time."""
        with torch.cuda.stream(stream):  # None: the current one
            launched = self._kernel[(self._num_programs,)](*arguments, **self._constants, **self._options)
        compiled = None if is_interpreter() else compiled_kernel(launched)
        if compiled is not None and _runs_directly(compiled):
            if len(self._compiled) >= _MAX_KEPT:
                self._compiled.clear()
                self._repeated.clear()
            self._compiled[key] = compiled, recorder_of(compiled, self._num_programs)


@lru_cache(maxsize=8192)
def kept_launch(
    kernel: Any, num_programs: int, *kinds: Hashable, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> KernelLaunch:
    """The ``KernelLaunch`` of a kernel with these constants, in their order, for operands of these types and device
    (``kinds``); kept, so that only the first launch goes through Triton."""
    values = {name: as_constant(value) for name, value in constants.items()}
    return KernelLaunch(kernel, num_programs, values, num_warps=num_warps, num_stages=num_stages)


@contextmanager
def compiled_together(device: torch.device) -> Iterator[None]:
    """What ``KernelLaunch.compile`` is asked for inside is compiled several kernels at a time; at the end all is
    there, and loaded on ``device``, for which Triton compiles a launcher each (1 s). A kernel that does not compile
    raises when it is launched."""
    from triton import AsyncCompileMode

    def load(future: Any) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        with suppress(Exception):  # it is raised again by the launch, on every rank
            _ = future.result().run

    with ThreadPoolExecutor(_COMPILER_THREADS) as executor:
        with AsyncCompileMode(executor, ignore_errors=True) as mode:
            yield
            futures = list(mode.future_kernels.values())  # Triton 3.9 forgets them at the end of the mode
        list(executor.map(load, futures))


def _current_device() -> int:
    return -1 if is_interpreter() else torch.cuda.current_device()


def _current_stream() -> int:
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())


def _runs_directly(compiled: Any) -> bool:
    """Whether this Triton's compiled kernel offers what ``__call__`` uses, and nobody has hooked launches."""
    return not has_launch_hooks() and all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata"))
