"""Writes down what calls of ops do, in order: what they launch, copy, signal, wait for and say to other ranks.

    with CallRecorder() as recorder:
        recorder.name(x=x, weight=weight)
        y = ag_gemm(x, weight, context=context)
        lines = recorder.take()

Each line is one event, without addresses, times or anything that depends on them:

=============== ======================================================================================================
``launch``      a Triton kernel: name, grid, arguments in order, constants by name, warps and stages
``torch``       an operator of torch that computes, copies or fills; views and allocations are left out
``c10d``        a collective or message of ``torch.distributed``
``copy``        bytes from address to address: a copy engine's command on GPUs
``flag``        a flag that a stream, or the host for it, writes
``wait``        a flag that a stream, or the host for it, waits for; once, however often it is looked at
``exchange``    what ranks tell each other on the host; texts are left out
``segment``     symmetric memory that is made
``window``      symmetric memory that is mapped once more
``mailbox``     a header, or an acknowledgement, between stages of a pipeline
``item``        a value that the host reads from a tensor
=============== ======================================================================================================

Memory is named: by the names given to ``name``, or ``S<n>`` for the n-th piece of symmetric memory, ``S<n>@+<d>`` for
that of the rank d after this one, with an offset in bytes. Other memory is ``-``; a table of addresses is ``&`` and
the name of this rank's. So a swapped operand shows, and an address does not.

The recorder patches: ``GridExecutor.__call__`` of Triton's interpreter, torch's dispatcher, ``ctypes.memmove`` in
``stream.copies``, ``stream.waits``, ``_Rendezvous.exchange``, ``Segment``, ``shared_mappings.map_side_by_side``,
``Mailbox`` and ``PipelineChannel.wait_for``.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import triton.runtime.interpreter as interpreter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.tools.tensor_descriptor import TensorDescriptor

from ditron_train.pp.channel import PipelineChannel
from ditron_train.pp.mailbox import Headers, Mailbox, Values
from ditron_train.stream import copies, shared_mappings, waits
from ditron_train.symm.exchange import _Rendezvous
from ditron_train.symm.transport import Segment

_LEAST_ADDRESS = 1 << 32
_MOST_RANKS = 8  # in a table of addresses
_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
#: Operators that allocate or look, and start nothing on a GPU.
_SILENT = frozenset(
    """empty empty_strided empty_like new_empty new_empty_strided detach detach_ alias lift_fresh is_pinned
    _has_compatible_shallow_copy_type set_ resize_ record_stream _unsafe_view is_same_size""".split()
)


def bits_of(tensors: Iterable[torch.Tensor | None]) -> str:
    """Hash of shapes, types and bits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            digest.update(b"None")
            continue
        tensor = tensor.detach().contiguous()
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def collapsed(lines: Sequence[str]) -> list[str]:
    """``3 x line`` for a line that comes three times running."""
    found: list[tuple[str, int]] = []
    for line in lines:
        if found and found[-1][0] == line:
            found[-1] = line, found[-1][1] + 1
        else:
            found.append((line, 1))
    return [line if count == 1 else f"{count} x {line}" for line, count in found]


class _Flag:
    """A flag of ``stream.waits`` whose writes are written down; reads are polls."""

    def __init__(self, recorder: CallRecorder, address: int) -> None:
        self._recorder, self._address = recorder, address

    @property
    def value(self) -> int:
        return ctypes.c_int32.from_address(self._address).value

    @value.setter
    def value(self, value: int) -> None:
        self._recorder.add(f"flag {self._recorder.place(self._address)}")
        ctypes.c_int32.from_address(self._address).value = value


class _Dispatch(TorchDispatchMode):
    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        kind, _, short = name.partition("::")
        if kind != "aten":
            if kind == "c10d" and not short.startswith("monitored"):
                self._recorder.add(f"c10d {short} {self._recorder.shown(args)}")
        elif short == "_local_scalar_dense":
            self._recorder.add(f"item {self._recorder.shown(args)}")
        elif not (short in _SILENT or function.is_view):
            self._recorder.add(f"torch {short} {self._recorder.shown(args)}")
        result = function(*args, **kwargs)
        if function.is_view or function._schema.is_mutable or not isinstance(result, torch.Tensor):
            return result
        return self._recorder.allocated(result)


class CallRecorder:
    """A context manager; one in a process at a time. It sees memory that is made while it is open."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._segments: list[tuple[list[int], int]] = []
        self._windows: list[tuple[int, int, list[int]]] = []
        self._names: dict[str, torch.Tensor] = {}
        self._stack = contextlib.ExitStack()
        self._is_paused = False
        self._stream: Callable[[], str] | None = None
        self._allocated: list[torch.Tensor] = []
        self._num_allocated = 0
        self._reuses_memory = False
        self._kept: list[torch.Tensor] = []

    # -- use --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> CallRecorder:
        patch = self._patch
        patch(interpreter.GridExecutor, "__call__", self._launch)
        patch(waits, "_wait_on_cpu", self._wait)
        self._stack.enter_context(mock.patch.object(waits, "_flag", lambda address: _Flag(self, address)))
        memmove = types.SimpleNamespace(memmove=self._memmove)
        self._stack.enter_context(mock.patch.object(copies, "ctypes", memmove))
        patch(_Rendezvous, "exchange", self._exchange)
        patch(Segment, "__post_init__", self._segment)
        patch(shared_mappings, "map_side_by_side", self._window)
        for owner, names in (
            (Headers, ("write_header", "acknowledge")),
            (Values, ("agree", "announce")),
            (Mailbox, ("set_flag",)),
        ):
            for name in names:
                patch(owner, name, functools.partial(self._mailbox, name))
        patch(PipelineChannel, "wait_for", self._wait_for)
        self._stack.enter_context(_Dispatch(self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _patch(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        before = getattr(owner, name)

        @functools.wraps(before)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return around(before, *args, **kwargs)

        self._stack.enter_context(mock.patch.object(owner, name, patched))

    def name(self, **tensors: torch.Tensor | None) -> None:
        """What the memory of these tensors is called from now on; they are kept alive."""
        self._names.update({name: tensor for name, tensor in tensors.items() if tensor is not None})

    def simulate(self, stream: Callable[[], str]) -> None:
        """From now on kernels are written down with the ``stream`` that they are launched on, and are not run."""
        self._stream = stream

    def reuse_memory(self) -> None:
        """From now on, if kernels are not run, what a call allocates is where it did in the call before it."""
        self._reuses_memory = self._stream is not None

    def allocated(self, made: torch.Tensor) -> torch.Tensor:
        """What an operator has made, perhaps in the memory of the call before this one."""
        if self._stream is None or self._is_paused:
            return made
        if not self._reuses_memory:  # kept, so that no later call is given it by chance
            self._kept.append(made)
            return made
        index, self._num_allocated = self._num_allocated, self._num_allocated + 1
        if index < len(self._allocated):
            before = self._allocated[index]
            if (before.shape, before.stride(), before.dtype) == (made.shape, made.stride(), made.dtype):
                return torch.ops.aten.alias(before.copy_(made))
        self._allocated[index:] = [made]
        return torch.ops.aten.alias(made)

    def take(self) -> list[str]:
        """What has come since the last time."""
        lines, self._lines = self._lines, []
        self._num_allocated = 0
        return collapsed(lines)

    def add(self, line: str) -> None:
        """One more event."""
        if not self._is_paused:
            self._lines.append(line.rstrip())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is written down inside."""
        before, self._is_paused = self._is_paused, True
        try:
            with _disable_current_modes():
                yield
        finally:
            self._is_paused = before

    # -- words ------------------------------------------------------------------------------------------------------

    def place(self, address: int) -> str:
        """The name of the memory at an address."""
        for base, pitch, addresses in reversed(self._windows):
            if base <= address < base + pitch * len(addresses):
                return self.place(addresses[(address - base) // pitch] + (address - base) % pitch)
        for number in range(len(self._segments) - 1, -1, -1):
            addresses, num_bytes = self._segments[number]
            for rank, base in enumerate(addresses):
                if base <= address < base + num_bytes:
                    distance = (rank - dist.get_rank()) % len(addresses)
                    return _with_offset(f"S{number}@+{distance}" if distance else f"S{number}", address - base)
        for name, tensor in self._names.items():
            storage = tensor.untyped_storage()
            if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                return _with_offset(name, address - tensor.data_ptr())
        return "-"

    def _place_of(self, tensor: torch.Tensor) -> str:
        """The name of a tensor's memory; of a table of addresses, ``&`` and the name of this rank's."""
        if not tensor.numel() or tensor.device.type != "cpu":
            return "-"
        place = self.place(tensor.data_ptr())
        if place == "-" and tensor.dtype == torch.int64 and tensor.numel() <= _MOST_RANKS:
            with self.paused():
                addresses = tensor.flatten().tolist()
            if min(addresses) >= _LEAST_ADDRESS:
                own = addresses[dist.get_rank()] if len(addresses) == dist.get_world_size() else addresses[0]
                return f"&{self.place(own)}"
        return place

    def shown(self, value: Any) -> str:
        """Arguments in words."""
        if isinstance(value, torch.Tensor):
            sizes = "x".join(map(str, value.shape))
            strides = "" if value.is_contiguous() else "/" + ".".join(map(str, value.stride()))
            place = self._place_of(value)
            return f"{place}:{_SHORT.get(value.dtype, str(value.dtype))}[{sizes}{strides}]"
        if isinstance(value, TensorDescriptor):
            blocks = "x".join(map(str, value.block_shape))
            sizes = f"{list(value.shape)}/{list(value.strides)}".replace(" ", "")
            return f"desc({self.shown(value.base)} {sizes} by {blocks})"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
            return "(" + " ".join(f"{name}={self.shown(part)}" for name, part in fields) + ")"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return "(" + " ".join(f"{n}={self.shown(part)}" for n, part in zip(value._fields, value)) + ")"
        if isinstance(value, (tuple, list)):
            return "(" + " ".join(map(self.shown, value)) + ")"
        if isinstance(value, bool) or value is None or isinstance(value, float):
            return repr(value)
        if isinstance(value, int):
            return str(value) if abs(value) < _LEAST_ADDRESS else f"&{self.place(value)}"
        if isinstance(value, torch.dtype):
            return _SHORT.get(value, str(value))
        if isinstance(value, str):
            return value
        if hasattr(value, "value"):  # a constexpr
            return self.shown(value.value)
        return type(value).__name__

    def _plain(self, value: Any) -> str:
        """What is exchanged: without texts, which hold paths."""
        if isinstance(value, (str, bytes)):
            return "text"
        if isinstance(value, (tuple, list)):
            return "(" + " ".join(map(self._plain, value)) + ")"
        return self.shown(value)

    # -- events -----------------------------------------------------------------------------------------------------

    def _launch(self, run: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> Any:
        names = executor.arg_names
        options = {name: value for name, value in kwargs.items() if name not in names and name != "enable_fp_fusion"}
        given = dict(zip(names, args)) | {name: value for name, value in kwargs.items() if name in names}
        grid = executor.grid(given) if callable(executor.grid) else executor.grid
        for name in executor.constexprs:  # what is left out has its default
            if name not in given:
                given[name] = inspect.signature(executor.fn).parameters[name].default
        operands = " ".join(self.shown(value) for name, value in given.items() if name not in executor.constexprs)
        constants = " ".join(f"{name}={self.shown(given[name])}" for name in executor.constexprs)
        how = " ".join(f"{name}={value}" for name, value in sorted(options.items()))
        stream = "" if self._stream is None else self._stream()
        grid = self.shown(tuple(grid))
        self.add(f"launch {executor.fn.__name__} {grid} {operands} | {constants} | {how}{stream}")
        if self._stream is not None:
            return None
        with self.paused():
            return run(executor, *args, **kwargs)

    def _wait(self, run: Callable[..., Any], channel: Any, address: int, epoch: int, peer: int, chunk: int) -> Any:
        self.add(f"wait {self.place(address)} peer {peer} chunk {chunk}")
        with self.paused():
            return run(channel, address, epoch, peer, chunk)

    def _wait_for(self, run: Callable[..., Any], channel: Any, index: int, epoch: int, **options: Any) -> Any:
        """Of a pipeline's flag: none is enqueued if the host sees that it has come."""
        self.add(f"wait flag {index} for {epoch} peer {options['peer']} chunk {options['chunk']}")
        with self.paused():
            return run(channel, index, epoch, **options)

    def _memmove(self, destination: int, source: int, num_bytes: int) -> None:
        self.add(f"copy {self.place(destination)} <- {self.place(source)} {num_bytes}")
        ctypes.memmove(destination, source, num_bytes)

    def _exchange(self, run: Callable[..., Any], rendezvous: Any, value: object, turns: int = 1) -> Any:
        self.add(f"exchange {self._plain(value)}" + ("" if turns == 1 else f" turns {turns}"))
        return run(rendezvous, value, turns)

    def _segment(self, run: Callable[..., Any], segment: Any) -> None:
        run(segment)
        with self.paused():
            num_bytes = segment.local.numel()
        self.add(f"segment S{len(self._segments)} of {num_bytes}")
        self._segments.append((list(segment.addresses), num_bytes))

    def _window(self, run: Callable[..., Any], addresses: Sequence[int], num_bytes: int) -> Any:
        self.add(f"window {' '.join(map(self.place, addresses))}")
        base, pitch, offset = run(addresses, num_bytes)
        self._windows.append((base, pitch, list(addresses)))
        return base, pitch, offset

    def _mailbox(self, name: str, run: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        # What is acknowledged depends on which headers have come by then.
        shown = () if name == "acknowledge" else [value for value in args if not callable(value)]
        self.add(f"mailbox {name} {self._plain(shown)}")
        with self.paused():
            return run(owner, *args, **kwargs)


def _with_offset(name: str, offset: int) -> str:
    return f"{name}+{offset}" if offset else name
