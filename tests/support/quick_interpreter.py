"""Lets Triton's interpreter remember what an operation of ``triton.language`` comes down to.

Of the time of an interpreted operation, nine tenths decide what is computed: which types are promoted, cast and
broadcast. That depends on types, shapes and constants alone, not on the values, so after the first time only the
calls of the interpreter's builder are made again, with the handles of the moment: they compute, and their results are
those of Triton's own path. What cannot be remembered (a result that does not come from the builder) takes that path.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any

from ditron_train.cpu.interpreter import patch_builtins

_MARK = "_ditron_remembers_operations"
#: Operations that one process remembers. A loop over a thousand Python integers is a thousand of them.
_MOST = 20_000
#: Methods of the builder whose results depend on their arguments alone.
_FIXED = ("get_", "create_splat", "create_make_range", "create_broadcast", "create_expand_dims")
_PLAIN = (int, bool, str, type(None))


#: What is remembered, by operation, types and constants; None for what cannot be.
_plans: dict[tuple[Any, ...], _Plan | None] = {}


class _Unknown(Exception):
    """A value that says neither by its type nor by itself what an operation does with it."""


def install() -> None:
    """Repairs the interpreter of this process (``ditron_train.cpu.interpreter``) and lets it remember. Idempotent."""
    import triton.runtime.interpreter as interpreter

    from ditron_train.cpu import interpreter as repairs

    repairs.install()
    if not hasattr(interpreter, _MARK):
        setattr(interpreter, _MARK, True)
        _remember_operations(interpreter)
        _shorten_handles(interpreter)
        _shorten_builder(interpreter)
        _remember_arguments(interpreter)
        _leave_arguments_where_they_are(interpreter)


def rewrite_kernels() -> None:
    """Has the interpreter read and compile all kernels that are imported, once for all forks of this process."""
    from triton.runtime.interpreter import InterpretedFunction

    for name, module in list(sys.modules.items()):
        if name.startswith(("ditron_train.", "triton.language.")):
            for member in list(vars(module).values()):
                if isinstance(member, InterpretedFunction):
                    member.rewrite()


def _shorten_handles(interpreter: Any) -> None:
    """A handle's size is checked, and operands of other types than bf16 are told from it, by the id of a type."""
    import triton.language as tl

    whole = (tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64)
    most_bytes = {id(dtype): dtype.primitive_bitwidth // 8 for dtype in (*whole, tl.float16, tl.float32, tl.float64)}
    pointers: dict[int, Any] = {}
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    native_check, native_binary = handle.__post_init__, builder.binary_op

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr
        if data.itemsize > most_bytes.get(id(dtype), 0) and id(dtype) not in pointers:
            native_check(self)
            if isinstance(dtype, tl.pointer_type) and len(pointers) < _MOST:
                pointers[id(dtype)] = dtype  # which has this id as long as it is here

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        most = most_bytes.get(id(lhs.dtype))
        if most is None or lhs.data.dtype == bool:  # newer versions add truth values as integers of one bit
            return native_binary(self, lhs, rhs, op)
        found = op(lhs.data, rhs.data)
        if found.itemsize > most:
            found = found.astype(interpreter._get_np_dtype(lhs.dtype))
        return handle(found, lhs.dtype)

    handle.__init__, builder.binary_op = init, binary_op


def _shorten_builder(interpreter: Any) -> None:
    """What is done most often, without NumPy's functions that are Python themselves."""
    builder, handle, empty = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.np.empty
    to_whole = interpreter.np.uint64
    strides: dict[int, tuple[Any, int]] = {}  # of elements, with the pointer's type, which has this id meanwhile

    def addptr(self: Any, ptr: Any, offset: Any) -> Any:
        known = strides.get(id(ptr.dtype))
        if known is None:
            known = ptr.dtype, max(1, ptr.get_element_ty().primitive_bitwidth // 8)
            if len(strides) < _MOST:
                strides[id(ptr.dtype)] = known
        return handle(ptr.data + known[1] * offset.data.astype(to_whole), ptr.dtype)

    def splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        found = empty(ret_ty.shape, interpreter._get_np_dtype(arg.dtype))
        found[...] = arg.data
        return handle(found, arg.dtype.scalar)

    def expand_dims(self: Any, arg: Any, axis: int) -> Any:
        return handle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)

    builder.create_addptr, builder.create_splat, builder.create_expand_dims = addptr, splat, expand_dims


def _remember_arguments(interpreter: Any) -> None:
    """The type of a tensor's pointer is found once for each type of its elements, that of a number for each range."""
    import torch
    from triton.language import core

    native, handle, semantic = interpreter._implicit_cvt, interpreter.TensorHandle, interpreter.interpreter_semantic
    native_to_tensor = semantic.to_tensor
    pointers: dict[Any, Any] = {}
    small = native(7).type
    zero_d, whole = native(7).handle.data.dtype, interpreter.np.array

    def implicit_cvt(arg: Any) -> Any:
        if arg.__class__ is int and -(2**31) <= arg < 2**31:
            return core.tensor(handle(whole([arg], dtype=zero_d), small), small)
        if isinstance(arg, torch.Tensor):
            if arg.dtype not in pointers:
                pointers[arg.dtype] = native(arg).type
            pointer = pointers[arg.dtype]
            return core.tensor(handle(whole([arg.data_ptr()], dtype="uint64"), pointer), pointer)
        return native(arg)  # which comes back here for the items of a tuple

    def to_tensor(x: Any, check_type: bool = True) -> Any:
        return x if x.__class__ is core.tensor else native_to_tensor(x, check_type)

    interpreter._implicit_cvt, semantic.to_tensor = implicit_cvt, to_tensor


def _leave_arguments_where_they_are(interpreter: Any) -> None:
    """Tensors of a CPU need not be brought there; what a kernel's arguments are called is read once."""
    executor = interpreter.GridExecutor
    parameters = [*inspect.signature(executor.__init__).parameters]
    native_init, known = executor.__init__, {}

    def init(self: Any, fn: Any, arg_names: Any, grid: Any, pre_run_hooks: Any = ()) -> None:
        if fn not in known:
            native_init(self, fn, arg_names, grid, pre_run_hooks)
            known[fn] = self.constexprs
        self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
        self.constexprs = known[fn]

    class Inspect:
        """``inspect``, which remembers what functions are called with."""

        getfullargspec = staticmethod(functools.cache(inspect.getfullargspec))

        def __getattr__(self, name: str) -> Any:
            return getattr(inspect, name)

        def getcallargs(self, fn: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            """Arguments by name."""
            names = self.getfullargspec(fn).args
            found = {**dict(zip(names, args)), **kwargs}
            is_plain = len(found) == len(names) == len(args) + len(kwargs)
            return found if is_plain else inspect.getcallargs(fn, *args, **kwargs)

    if parameters == ["self", "fn", "arg_names", "grid", "pre_run_hooks"]:
        executor.__init__ = init
    executor._init_args_hst = lambda self, args, kwargs: ([*args], dict(kwargs))
    executor._restore_args_dev = lambda self, *arguments: None
    interpreter.inspect = Inspect()


class _Plan:
    """What one operation comes down to.

    Attributes:
        steps: Names of the builder's methods, how their arguments are picked from the values, and places of arguments
            that are lists (else None). The values are the operation's own handles, then ``constants``, then results of
            earlier steps.
        constants: Arguments that are no handles.
        result: ``(place, attributes of the result but its handle)``, or ``(None, the result itself)``.
        kept: Types whose ids are in the plan's key.
    """

    __slots__ = ("steps", "constants", "result", "kept")

    def __init__(
        self, steps: list[Any], constants: list[Any], result: tuple[int | None, Any], kept: list[Any]
    ) -> None:
        self.steps, self.constants, self.result, self.kept = steps, constants, result, kept


def _picking(places: list[int]) -> Callable[[list[Any]], Any]:
    """A function that takes the values at `places` from a list."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    first = places[0] if places else 0
    return operator.itemgetter(slice(first, first + len(places)))


class _Recording:
    """The interpreter's builder, which writes down how it is called as long as ``begin`` has said so."""

    def __init__(self, builder: Any, handle_types: tuple[type, ...]) -> None:
        self._builder, self._handle_types = builder, handle_types
        self._steps: list[tuple[str, list[Any], int]] = []
        self._handles: list[Any] = []
        self._is_whole = True

    def begin(self, handles: list[Any]) -> None:
        """Forgets the operation before; `handles` are those of the next one's arguments."""
        self._steps, self._handles, self._is_whole = [], list(handles), True

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        if not inspect.ismethod(member) and not callable(member):
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            found = member(*args, **kwargs)
            self._add(name, args, kwargs, found)
            return found

        return call

    def place(self, handle: Any) -> int | None:
        """Where a handle is among those of this operation."""
        return next((i for i, known in enumerate(self._handles) if known is handle), None)

    def _add(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        if isinstance(found, (tuple, list)) or kwargs:
            self._is_whole = False
        if found is None or isinstance(found, self._handle_types):
            self._steps.append((name, [self._argument(arg) for arg in args], len(self._handles)))
            self._handles.append(found)
        # What else it answers, types and the like, depends on types, shapes and constants.

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, self._handle_types):
            place = self.place(arg)
            self._is_whole &= place is not None
            return ("handle", place)
        if isinstance(arg, (list, tuple)) and any(isinstance(item, self._handle_types) for item in arg):
            return ("list", [self._argument(item) for item in arg])
        return ("constant", arg)

    def plan(self, num_inputs: int, result: Any, tensor: type, kept: list[Any]) -> _Plan | None:
        """The plan of the operation that has ended with `result`; None if it does not say all."""
        constants: list[Any] = []
        places = {}  # among the values of the plan, by place among the handles
        pending: list[tuple[str, list[Any], int]] = []
        for place in range(num_inputs):
            places[place] = place
        for name, args, place in self._steps:
            is_fixed = name.startswith(_FIXED) and all(
                kind == "constant" or (kind == "handle" and places.get(value, 0) >= num_inputs) for kind, value in args
            )
            if is_fixed and not any("ashr" in other for other, *_ in self._steps):  # which writes to its operands
                places[place] = num_inputs + len(constants)
                constants.append(self._handles[place])
            else:
                pending.append((name, args, place))

        def fixed(arg: Any) -> Any:
            kind, value = arg
            if kind != "constant":
                return arg
            constants.append(value)
            return ("value", num_inputs + len(constants) - 1)

        pending = [
            (name, [("list", [fixed(i) for i in a[1]]) if a[0] == "list" else fixed(a) for a in args], place)
            for name, args, place in pending
        ]
        for number, (*_, place) in enumerate(pending):
            places[place] = num_inputs + len(constants) + number

        def located(arg: Any) -> Any:
            kind, value = arg
            if kind == "list":
                return [located(item) for item in value]
            return value if kind == "value" else places[value]

        if not self._is_whole:
            return None
        steps = []
        for name, args, _ in pending:
            where = [located(arg) for arg in args]
            is_nested = any(isinstance(item, list) for item in where)
            steps.append((name, None if is_nested else _picking(where), where if is_nested else None))
        if result is None or (isinstance(result, tensor) and result.handle is None):  # of what only writes
            return _Plan(steps, constants, (None, result), kept)
        place = self.place(result.handle) if isinstance(result, tensor) else None
        if place is None:
            return None
        like = {name: value for name, value in vars(result).items() if name != "handle"}
        return _Plan(steps, constants, (places[place], like), kept)


def _remember_operations(interpreter: Any) -> None:
    from triton.language import core

    tensor, constexpr, builder = core.tensor, core.constexpr, interpreter.interpreter_builder
    descriptors = core.tensor_descriptor_base
    handle_names = ("TensorHandle", "TensorDescHandle", "BlockPointerHandle")  # newer versions lack the last
    recording = _Recording(builder, tuple(getattr(interpreter, n) for n in handle_names if hasattr(interpreter, n)))
    semantic, recording_semantic = interpreter.TritonSemantic(builder), interpreter.TritonSemantic(recording)
    plans = _plans
    types: dict[Any, Any] = {}  # one object for all types that are alike

    def one_of(type_: Any) -> Any:
        return types.setdefault((type(type_), type_.name, getattr(type_, "address_space", None)), type_)

    def key_of(arg: Any, key: list[Any], handles: list[Any]) -> None:
        """Adds what decides about an operation to `key`, and what it computes with to `handles`."""
        kind = arg.__class__
        if kind is tensor:
            key.append(id(arg.type))
            handles.append(arg.handle)
        elif kind in _PLAIN:
            key += (kind, arg)
        elif kind is float:
            key += (kind, arg or str(arg))  # zero has two signs
        elif kind is constexpr:
            key.append(kind)
            key_of(arg.value, key, handles)
        elif isinstance(arg, core.dtype):
            key.append(id(one_of(arg)))
        elif kind is list or kind is tuple or kind is core.tuple:
            key += (kind, len(arg))
            for item in arg:
                key_of(item, key, handles)
        elif kind is slice:
            key.append(kind)
            for item in (arg.start, arg.stop, arg.step):
                key_of(item, key, handles)
        elif isinstance(arg, descriptors) and isinstance(arg.handle, interpreter.TensorDescHandle):
            key += (kind, id(one_of(arg.type.block_type)))
            handles.append(arg.handle)
        else:
            raise _Unknown

    def share_types(arg: Any, kept: list[Any]) -> None:
        if isinstance(arg, tensor):
            arg.type = one_of(arg.type)
            kept.append(arg.type)
        elif isinstance(arg, (list, tuple, core.tuple)):
            for item in arg:
                share_types(item, kept)

    def remembered(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)  # what is around it asks for a semantic, and there is one

        def keyed(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], list[Any]]:
            key: list[Any] = [function]
            handles: list[Any] = []
            for arg in args:
                if arg.__class__ is tensor:
                    key.append(id(arg.type))
                    handles.append(arg.handle)
                else:
                    key_of(arg, key, handles)
            for name, arg in kwargs.items():
                key.append(name)
                key_of(arg, key, handles)
            return tuple(key), handles

        def first(args: Any, kwargs: Any, key: Any, handles: list[Any]) -> Any:
            if len(plans) >= _MOST or len({*map(id, handles)}) < len(handles):  # x * x does not say what x * y is
                return function(*args, **kwargs, _semantic=semantic)
            kept: list[Any] = []
            share_types([*args, *kwargs.values()], kept)
            shared, handles = keyed(args, kwargs)
            if shared != key and shared in plans:
                return again(args, kwargs, shared, handles)
            recording.begin(handles)
            found = function(*args, **kwargs, _semantic=recording_semantic)
            if isinstance(found, tensor):
                found.type = one_of(found.type)
            plans[shared] = recording.plan(len(handles), found, tensor, kept)
            return found

        def again(args: Any, kwargs: Any, key: Any, values: list[Any]) -> Any:
            plan = plans[key]
            if plan is None:
                return function(*args, **kwargs, _semantic=semantic)
            values += plan.constants
            for name, pick, nested in plan.steps:
                if nested is None:
                    given = pick(values)
                else:
                    given = [[values[i] for i in p] if p.__class__ is list else values[p] for p in nested]
                values.append(getattr(builder, name)(*given))  # asked for anew: tests replace methods
            place, like = plan.result
            if place is None:
                return like
            found = tensor.__new__(tensor)
            found.__dict__.update(like)
            found.handle = values[place]
            return found

        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            if _semantic is recording_semantic:
                return function(*args, **kwargs, _semantic=_semantic)
            try:
                key, handles = keyed(args, kwargs)
            except _Unknown:
                return function(*args, **kwargs, _semantic=semantic)
            return (again if key in plans else first)(args, kwargs, key, handles)

        return call

    patch_builtins(interpreter, remembered)
