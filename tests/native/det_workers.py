"""Bodies of the tests of feature ``det``: small GPTs in deterministic mode, trained natively with PyTorch's fill of
new tensors, and with ``det``."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import combination_workers as jobs


class Unwritten(torch.nn.Module):
    """Adds what nobody has written: of deterministic mode's fill, only whether it is finite. ``ranks``: which read
    it."""

    def __init__(self, norm: torch.nn.Module, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.norm, self.ranks = norm, ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unwritten = torch.empty(3, device=x.device)
        if dist.get_rank() in self.ranks:
            x = x + unwritten.isfinite().sum()
        return self.norm(x)


class Counting(torch.nn.Module):
    """Has a number, a buffer and another tensor that each call changes, and that its result depends on."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.calls, self.last = norm, 0, torch.zeros(())
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        self.last = self.last + 1
        return self.norm(x) * (1 + 0.1 * self.calls + 0.01 * self.seen + 0.001 * self.last)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """As Megatron's ``--deterministic-mode`` has PyTorch; at the end the fill is on again."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _train(
    case: jobs.Case, change: Callable[[Any], None] | None, wrap: Callable[[Any], Any], steps: int = 3
) -> dict[str, Any]:
    """What ``jobs.train`` gives, the batches coming from one stream; where the stream and random states are at the
    end."""
    streams: dict[int, Iterator[Any]] = {}
    build, batches, number = jobs._models, jobs._batches, itertools.count()

    def models(*args: Any) -> list[Any]:
        built = build(*args)
        for model in built if change is not None else ():
            change(model)
        return built

    def stream(case: jobs.Case, step: int, microbatches: int) -> Any:
        if step >= 1000:
            return wrap(batches(case, step, microbatches))
        chunks = case.sizes.get("virtual_pipeline_model_parallel", 1)
        return wrap(streams.setdefault(next(number) % chunks, batches(case, 1, 100)))

    with replaced(jobs, "_models", models), replaced(jobs, "_batches", stream):
        seen: dict[str, Any] = jobs.train(case, fused=False, steps=steps)
    seen.update({f"next batch of {chunk}": next(one)["tokens"] for chunk, one in streams.items()})
    seen["random numbers"] = torch.rand(4)
    return seen


def _logged() -> dict[str, Any]:
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    trackers = {**moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER, "mtp": MTPLossLoggingHelper.tracker}
    return {f"logged {name}": one["values"].clone() for name, one in trackers.items() if "values" in one}


def compared(
    case: jobs.Case,
    change: Callable[[Any], None] | None = None,
    around: Callable[[], Any] = contextlib.nullcontext,
    wrap: Callable[[Any], Any] = iter,
) -> tuple[list[str], bool, list[str]]:
    """What differs between native training and training with ``det``, whether new tensors are filled at its end, and
    what it logs; ``change``: of each chunk of the model; ``around``: a context of the second training; ``wrap``: what
    is handed over as an iterator."""
    import ditron_train.megatron as plugin
    from ditron_train.runtime import logs
    from tests.support.model_parallel import model_parallel

    def run() -> dict[str, Any]:
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        for tracker in (moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER, MTPLossLoggingHelper.tracker):
            tracker.clear()
        return {**_train(case, change, wrap), **_logged()}

    assert torch.utils.deterministic.fill_uninitialized_memory
    with deterministic(), model_parallel(**{f"{name}_size": size for name, size in case.sizes.items()}):
        if case.needed is not None:
            plugin.apply(features=case.needed)
        native = run()
        plugin.restore()
        logs._seen.clear()
        with jobs._log_lines() as lines, around():
            plugin.apply(features=case.features)
            fused = run()
            is_filled = torch.utils.deterministic.fill_uninitialized_memory
        plugin.restore()
    assert native.keys() == fused.keys()
    bits = {
        name: torch.equal(one.nan_to_num(), fused[name].nan_to_num()) and torch.equal(one.isnan(), fused[name].isnan())
        for name, one in native.items()
    }
    return (
        [name for name, is_equal in bits.items() if not is_equal],
        is_filled,
        [one for one in lines if one.startswith("det")],
    )


def read_unwritten(ranks: tuple[int, ...], case: jobs.Case) -> tuple[list[str], bool, list[str]]:
    """``compared`` of a model whose first layer reads unwritten memory on ``ranks``."""

    def change(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "input_layernorm"):
                module.input_layernorm = Unwritten(module.input_layernorm, ranks)
                return

    return compared(case, change)


def count_calls(case: jobs.Case) -> tuple[list[str], bool, list[str]]:
    """``compared`` of a model whose layers keep more than parameters."""

    def change(model: Any) -> None:
        for module in [one for one in model.modules() if hasattr(one, "input_layernorm")]:
            module.input_layernorm = Counting(module.input_layernorm)

    return compared(case, change)


def fail(
    case: jobs.Case, place: str, ranks: tuple[int, ...], error: type[Exception], number: int
) -> tuple[list[str], bool, list[str]]:
    """``compared`` of a check in which ``place`` raises ``error`` at its ``number``-th call, on ``ranks``."""
    from ditron_train.megatron.det import step_state

    owner: Any = {"digest": step_state, "_RandomStates": step_state, "_forward_step": jobs}[place]
    native, calls = getattr(owner, place), itertools.count(1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number and dist.get_rank() in ranks:
            raise error("inside the check")
        return native(*args, **kwargs)

    return compared(case, around=lambda: replaced(owner, place, fails))


class Handed:
    """Batches of a framework that takes them by a name of its own."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.take = iterator.__next__


def refused(kind: str, case: jobs.Case) -> tuple[list[str], bool, list[str]]:
    """``compared`` where the step cannot run again from the same state."""
    from megatron.core.distributed import DistributedDataParallel

    batches, zero, step = jobs._batches, DistributedDataParallel.zero_grad_buffer, jobs._forward_step

    def with_gradients(model: Any) -> None:
        zero(model)
        model.buffers[0].grad_data[0] = 1.0

    changes = {
        "gradients": (DistributedDataParallel, "zero_grad_buffer", with_gradients),
        "iterator": (jobs, "_forward_step", lambda handed, model: step(iter(handed.take, None), model)),
        "batches": (jobs, "_batches", lambda *args: ({**batch, "lock": threading.Lock()} for batch in batches(*args))),
    }
    with replaced(*changes[kind]):
        return compared(case, wrap=Handed if kind == "iterator" else iter)


def without_the_fill(kind: str, case: jobs.Case) -> tuple[list[str], bool, list[str]]:
    """``compared`` in PyTorch's default mode, or where the user has switched the fill off; no step runs again."""
    from ditron_train.megatron.det import first_step

    @contextlib.contextmanager
    def mode() -> Iterator[None]:
        torch.use_deterministic_algorithms(kind == "no fill", warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = kind != "no fill"
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = True

    with replaced(sys.modules[__name__], "deterministic", mode), replaced(first_step, "_first_step", None):
        return compared(case)


def counted_steps(case: jobs.Case) -> dict[str, int]:
    """What ``compare`` is told of the training steps with ``det``."""
    from ditron_train.megatron.plugin.fused_calls import FUSED_CALLS

    FUSED_CALLS.install(("det",))
    FUSED_CALLS.take()
    assert compared(case)[:2] == ([], False)
    return FUSED_CALLS.take()


def without_iterator(case: jobs.Case) -> tuple[list[str], bool, list[str]]:
    """``compared`` where this rank is handed no batches: its forward step makes them."""
    batches, step = jobs._batches, jobs._forward_step
    with replaced(jobs, "_forward_step", lambda iterator, model: step(batches(case, 1, 1), model)):
        return compared(case, wrap=lambda iterator: None)


def embedded(case: jobs.Case) -> tuple[list[str], bool, int]:
    """``compared`` where the embedding's gradient is taken from here on CPUs, too, and how many steps and embeddings
    were counted. One sequence a microbatch: CPUs add the gradients of several in the order of memory, GPUs do not."""
    from ditron_train.megatron.det import embedding
    from ditron_train.megatron.plugin.fused_calls import FUSED_CALLS

    FUSED_CALLS.install(("det",))
    FUSED_CALLS.take()
    with replaced(jobs, "BATCH", 1):
        different, is_filled, _ = compared(case, around=lambda: replaced(embedding, "_DEVICES", ("cpu",)))
    return different, is_filled, FUSED_CALLS.take()["det"]
