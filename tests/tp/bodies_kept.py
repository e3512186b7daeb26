"""What the workers of the tests of kept inputs run, on each rank, with gloo initialised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bodies_tp import gather_rows, integers
from torch.utils.checkpoint import checkpoint

from ditron_train.runtime.errors import MismatchError, NotSupportedError
from ditron_train.symm.arena import SymmetricArena
from ditron_train.tp import TPContext, column_linear, linear
from ditron_train.tp.linear import PlainWgrad

CPU = torch.device("cpu")
ROWS, K, N = 96, 4096, 16  # of all ranks: 1.5 MiB of fp32


class Layer:
    """A column layer with calls on integers, whose gradients are compared with gloo's gather and plain products."""

    def __init__(self, context: TPContext, seed: int, k: int = K) -> None:
        self.context, self.k = context, k
        self.weight = integers((N, k), 10 * seed + context.rank).requires_grad_()
        self.wanted = torch.zeros(N, k)

    def forward(self, seed: int, wgrad: PlainWgrad | None = None) -> Callable[..., None]:
        """One call; what it returns runs its backward and checks the gradients."""
        world, rank, rows = self.context.world_size, self.context.rank, ROWS // self.context.world_size
        x = integers((rows, self.k), 100 * seed + rank).requires_grad_()
        y = column_linear(x, self.weight, context=self.context, wgrad=wgrad)
        grad = integers((ROWS, N), 7 * seed + rank)
        total = gather_rows(x.detach(), [rows] * world)
        assert torch.equal(y.detach(), total @ self.weight.detach().t())

        def backward(retain_graph: bool = False) -> None:
            self.context.gathered(ROWS, K, torch.float32).local.fill_(float("nan"))  # as another layer's gather
            x.grad = None
            y.backward(grad, retain_graph=retain_graph)
            dgrad = grad @ self.weight.detach()
            dist.all_reduce(dgrad)
            self.wanted += grad.t() @ total
            assert torch.equal(x.grad, dgrad.chunk(world)[rank])
            assert torch.equal(self.weight.grad, self.wanted)

        return backward


@contextmanager
def _counted() -> Iterator[Callable[[], int]]:
    """Counts the gathers of column layers' backward; asking starts anew."""
    with mock.patch.object(linear, "start_all_gather", side_effect=linear.start_all_gather) as gather:

        def count() -> int:
            number = gather.call_count
            gather.reset_mock(side_effect=False)
            return number

        yield count


def _new_context() -> TPContext:
    """Made while the setting is as the test has it, on a group of its own."""
    return TPContext(dist.new_group(list(range(dist.get_world_size()))), CPU)


def _num_places(context: TPContext) -> tuple[int, int]:
    """Places, and how many are free."""
    assert context.kept is not None
    places = context.kept._places
    return len(places), sum(place.is_free for place in places)


def num_gathers_of_pipelines() -> list[int]:
    """Gathers in backward of two layers and three microbatches, the last first; of four as under 1F1B, twice; and of
    two of a smaller layer."""
    context, found = _new_context(), []
    layers = [Layer(context, seed) for seed in (1, 2)]
    with _counted() as count:
        backwards = [layer.forward(seed) for seed in range(3) for layer in layers]
        for backward in reversed(backwards):
            backward()
        found.append(count())
        for step in range(2):
            waiting: list[Callable[..., None]] = []
            for seed in range(4):
                waiting += [layer.forward(9 * step + seed) for layer in layers]
                if len(waiting) > 2:  # of each microbatch the last layer goes back first
                    for backward in reversed([waiting.pop(0), waiting.pop(0)]):
                        backward()
            for backward in reversed(waiting):
                backward()
            found.append(count())
        small = Layer(context, 3, k=K // 2)
        for seed in (5, 6):
            small.forward(seed)()
        found.append(count())
    assert context.kept is None or _num_places(context)[0] == _num_places(context)[1] <= 4
    return found


def check_dropped_and_repeated() -> None:
    """A graph that is dropped gives its place back with the next backward of its layer; a second backward of one graph
    is right, also where its place has gone to another call; so is one whose weight gradient fails."""
    context = _new_context()
    layer = Layer(context, 1)
    layer.forward(0)()
    with _counted() as count:
        layer.forward(1)
        layer.forward(2)
        assert _num_places(context) == (2, 0)
        layer.forward(3)()  # without a place
        assert count() == 1 and _num_places(context) == (2, 2)
        backward = layer.forward(4)
        backward(retain_graph=True)
        backward(retain_graph=True)
        assert count() == 0
        others = [layer.forward(seed) for seed in (5, 6)]
        backward()
        assert count() == 1
        for other in others:
            other()
        assert count() == 0

        class Failing(PlainWgrad):
            def __call__(self, grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor:
                raise MemoryError

        for _ in range(3):
            try:
                layer.forward(7, Failing())()
            except MemoryError:
                pass
        assert count() == 1  # the third found no place
        layer.forward(8)()
        layer.forward(9)()
        assert count() == 1 and _num_places(context) == (2, 2)


def num_entered_by_backward() -> list[int]:
    """How often backward orders the streams of two calls whose inputs need no gradient, the second's kept; after a
    mistake of all ranks."""
    context, found = _new_context(), []
    layer = Layer(context, 1)
    with pytest.raises(NotSupportedError):
        column_linear(torch.tensor(1.0), layer.weight, context=context)
    for seed in range(2):
        x = integers((ROWS // context.world_size, K), 10 * seed + context.rank)
        y = column_linear(x, layer.weight, context=context)
        with mock.patch.object(context._calls, "enter", side_effect=context._calls.enter) as enter:
            y.backward(integers(tuple(y.shape), 3))
            found.append(enter.call_count)
    return found


def num_kept_where_nothing_waits() -> dict[str, int]:
    """How many calls have a place where backward needs none, saves by itself, or computes again; and gathers of a
    recomputed layer's backward."""
    context, found = _new_context(), {}
    layer = Layer(context, 1)
    x = integers((ROWS // context.world_size, K), context.rank).requires_grad_()

    def call(x: torch.Tensor) -> torch.Tensor:
        return column_linear(x, layer.weight, context=context)

    def num_kept() -> int:
        return int.__sub__(*_num_places(context))

    call(x)  # of the first call nothing is kept
    with torch.no_grad():
        call(x)
    found["no_grad"] = num_kept()
    layer.weight.requires_grad_(False)
    y = call(x)
    found["frozen"] = num_kept()
    layer.weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        y = call(x)
    found["hooks"] = num_kept()
    with _counted() as count:
        for reentrant in (False, True):
            x.grad = layer.weight.grad = None
            y = checkpoint(call, x, use_reentrant=reentrant)
            found[f"checkpoint {reentrant}"] = num_kept()
            grad = integers(tuple(y.shape), 3 + context.rank)
            y.backward(grad)
            found[f"gathers {reentrant}"] = count()
            total = gather_rows(x.detach(), [x.shape[0]] * context.world_size)
            assert torch.equal(layer.weight.grad, grad.t() @ total)
            assert num_kept() == 0
    return found


def check_a_rank_that_keeps_alone() -> None:
    """Hooks on one rank's saved tensors: nothing is kept there, while its peers wait for its rows in a place."""
    context = _new_context()
    layer = Layer(context, 1)
    for seed in range(2):
        layer.forward(seed)()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with hooks if context.rank == 0 else nullcontext(), pytest.raises(MismatchError, match="buffer"):
        layer.forward(2)


def words_of_what_is_kept() -> list[str]:
    """What the log says of it, and that memory which is missing is no error."""
    context, told, tensor = _new_context(), [], SymmetricArena.tensor
    names: list[str] = []

    def allocating(arena: SymmetricArena, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> object:
        names.append(name)
        return tensor(arena, name, shape, dtype)

    def log_once(key: str, message: str, **_: object) -> None:
        if key not in told[::2]:
            told.extend((key, message))

    with (
        mock.patch("ditron_train.tp.kept.log_once", log_once),
        mock.patch.object(SymmetricArena, "tensor", allocating),
    ):
        layer = Layer(context, 1)
        layer.forward(0)()
        backwards = [layer.forward(seed) for seed in range(4)]
        for backward in backwards:
            backward()
    assert sum("tp.kept" in name for name in set(names)) == 2, names  # one is had, one is not
    return told[1::2]
