"""What a comparison of an op holds of memory, in a worker process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from bodies_specs import _case, _groups_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ditron_train.policy.probe import _compare
from ditron_train.tools.cases import BenchCase, RunEnvironment, Shape


class _Held(TorchDispatchMode):
    """The most bytes that lived at a time, of what was made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self._lives: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {self._key(leave) for leave in tree_leaves((args, kwargs)) if isinstance(leave, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and self._key(tensor) not in given:
                storage = tensor.untyped_storage()
                self._lives[self._key(tensor)] = (StorageWeakRef(storage), storage.nbytes())
        self._lives = {key: one for key, one in self._lives.items() if not one[0].expired()}
        self.most_bytes = max(self.most_bytes, sum(num_bytes for _, num_bytes in self._lives.values()))
        return found

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata


def _shapes_of(case: BenchCase) -> list[Shape]:
    """Its own; of linear layers and experts some more, whose operands and results differ in size."""
    shapes = list(case.shapes(dist.get_world_size(), False))
    if set(shapes[0].sizes) == set("mnk"):
        shapes += [Shape("more", dict(zip("mnk", mnk))) for mnk in ((512, 256, 256), (256, 512, 256), (256, 256, 512))]
    if case.op.name == "ep gathered_experts":
        first = shapes[0]
        for more in ({"tokens_per_rank": 96}, {"hidden": 64}, {"ffn_hidden": 192}, {"num_experts": 32}, {"topk": 4}):
            shapes.append(Shape("more", {**first.sizes, **more}, first.options))
    return shapes


def held_and_said(name: str) -> list[tuple[str, int, int]]:
    """Of each small shape: what comparing both paths held, and what the op says."""
    case, place, found = _case(name), RunEnvironment(dist.group.WORLD, torch.device("cpu"), torch.float32), []
    with _groups_of(case):
        for shape in _shapes_of(case):
            with case.surroundings(shape):
                call = case.sample(shape, place, 0)
                context = case.op.make_context(call)
                case.op.trial(call, context).fused()  # what a shape needs once
                with _Held() as held:
                    trial = case.op.trial(call, context)
                    for native, fused in ((trial.native, trial.fused), *trial.extra_cases):
                        _compare(native, fused, place.device)
                found.append((str(shape), held.most_bytes, case.op.peak_bytes(call)))
    return found
