"""Lets megatron-core 0.16.1 run on CPU tensors and gloo: for tests and for the CPU quickstart.

megatron-core names the current CUDA device, CUDA streams and ``device="cuda"`` outright. `install`
replaces those entry points of ``torch.cuda`` by ones that mean the CPU, and repairs four places of
megatron-core that work only on CUDA tensors or only with Transformer Engine or apex installed.
`uninstall` puts everything back. Nothing here is used when the tensors are on a GPU, except
`allow_torch_norm_with_sequence_parallel`.

Model configurations must also switch off what needs CUDA kernels: see `CPU_CONFIG`.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")

#: Keywords of ``TransformerConfig`` that a CPU run needs.
CPU_CONFIG: dict[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}


def leave_uncompiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Stands for ``torch.compile``, to which megatron-core hands its fusions on import; returns `function` as it is.

    Importing the compiler takes two seconds of every process, and it needs a C++ compiler on the CPU.
    """
    return function if function is not None else lambda decorated: decorated


class _Event:
    """Stands for a CUDA event: on the CPU everything has happened when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accepts what ``torch.cuda.Event`` accepts."""

    def record(self, stream: Any = None) -> None:
        """Nothing to record."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always complete."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """No device time passes, ms."""
        return 0.0


class _Stream:
    """Stands for a CUDA stream: work is done in program order."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accepts what ``torch.cuda.Stream`` accepts."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> _Event:
        """Returns `event`, or a new one."""
        return event or _Event()

    def synchronize(self) -> None:
        """Nothing to wait for."""


_CURRENT_STREAM = _Stream()


class _CudaMeansCpu(TorchFunctionMode):
    """Turns ``device="cuda"``, ``pin_memory=True`` and ``.cuda()`` into their CPU meaning."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)  # the optimizers compare these names
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _names_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


_MEMORY = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved device_memory_used".split()


def _torch_stand_ins() -> list[tuple[Any, str, Any]]:
    properties = types.SimpleNamespace(name="CPU", major=0, minor=0, total_memory=0, multi_processor_count=1)
    cuda = torch.cuda
    return [
        (torch, "compile", leave_uncompiled),
        (cuda, "current_device", lambda: _CPU),
        (cuda, "set_device", lambda device: None),
        (cuda, "device_count", lambda: 1),
        (cuda, "synchronize", lambda device=None: None),
        (cuda, "empty_cache", lambda: None),
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Event),
        (cuda, "current_stream", lambda device=None: _CURRENT_STREAM),
        (cuda, "default_stream", lambda device=None: _CURRENT_STREAM),
        (cuda, "stream", lambda stream: contextlib.nullcontext()),
        (cuda, "set_stream", lambda stream: None),
        (cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
        (cuda, "get_device_properties", lambda device=None: properties),
        (cuda, "get_device_capability", lambda device=None: (0, 0)),
        *((cuda, name, lambda device=None: 0) for name in _MEMORY),
        (cuda, "reset_peak_memory_stats", lambda device=None: None),
        (cuda, "memory_stats", lambda device=None: {}),
        *((cuda, name, getattr(torch, name)) for name in ("LongTensor", "FloatTensor", "IntTensor")),
        (cuda.nvtx, "range_push", lambda message: 0),
        (cuda.nvtx, "range_pop", lambda: 0),
        (torch.Tensor, "record_stream", lambda self, stream: None),
    ]


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What megatron-core's ``maybe_move_tensor_to_cpu`` returns for a CUDA tensor."""
    return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor


def _new_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:
    """torch's own norm, its parameters marked for the all-reduce that sequence parallelism needs."""
    kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    if config.normalization not in kinds or config.layernorm_zero_centered_gamma:
        raise ValueError(f"no torch norm for {config.normalization} (zero-centered gamma or unknown)")
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    norm = kinds[config.normalization](hidden_size, eps=eps, device=device, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


_replaced = contextlib.ExitStack()  # puts everything back
_is_installed = _is_norm_replaced = False


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.enter_context(mock.patch.object(owner, name, value, create=True))


def is_installed() -> bool:
    """Whether `install` is in force in this process."""
    return _is_installed


def allow_torch_norm_with_sequence_parallel() -> None:
    """Make megatron-core's wrapper of torch's norms accept ``sequence_parallel``. Idempotent.

    Needed wherever neither Transformer Engine nor apex is installed, on GPUs too: without it the
    local layer spec cannot run with sequence parallelism at all. `uninstall` takes it back.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    global _is_norm_replaced
    if not _is_norm_replaced:
        _replace(WrappedTorchNorm, "__new__", _new_norm)
    _is_norm_replaced = True


def install() -> None:
    """Make megatron-core run on the CPU in this process. Idempotent; `uninstall` reverts it."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    for owner, name, value in _torch_stand_ins():
        _replace(owner, name, value)
    _replaced.enter_context(_CudaMeansCpu())

    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        _replace(moe_utils, "te_general_gemm", None)
    _replace(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    _replace(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
    _replace(token_dispatcher, "maybe_move_tensor_to_cpu", _to_host)
    allow_torch_norm_with_sequence_parallel()


def uninstall() -> None:
    """Undo `install` and `allow_torch_norm_with_sequence_parallel`. Idempotent."""
    global _is_installed, _is_norm_replaced
    _replaced.close()
    _is_installed = _is_norm_replaced = False


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """`install` on entry, `uninstall` on exit."""
    install()
    try:
        yield
    finally:
        uninstall()


@contextlib.contextmanager
def parallel_groups(**sizes: int | None) -> Iterator[None]:
    """megatron-core's groups of the given sizes (keywords of ``parallel_state.initialize_model_parallel``) for a tool;
    on exit they are gone, and so are the shim and what was applied."""
    from megatron.core import parallel_state

    from ditron_train.megatron import restore

    parallel_state.initialize_model_parallel(**sizes)
    seed(1234)
    try:
        yield
    finally:
        restore()
        parallel_state.destroy_model_parallel()
        uninstall()


def seed(value: int) -> None:
    """Seed torch and megatron-core's RNG trackers (model parallel groups must exist)."""
    from megatron.core import tensor_parallel

    torch.manual_seed(value)
    on_cpu = is_installed()  # the CUDA tracker reads CUDA's generators; the inference tracker does not
    tensor_parallel.model_parallel_cuda_manual_seed(value, inference_rng_tracker=on_cpu, force_reset_rng=True)
