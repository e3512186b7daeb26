"""What workers do for `test_groups`: groups that are wrapped, destroyed and made again, sleep and wake."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist

from ditron_train.policy import gate
from ditron_train.symm.arena import peak_bytes
from tests.reach import models
from tests.reach.bodies_activation import Lines

decide_module = importlib.import_module("ditron_train.policy.decide")  # the package has a function of that name


class Wrapped(dist.ProcessGroup):
    """Stands for a group that can be destroyed and made again, as slime's."""

    def __init__(self, group: dist.ProcessGroup, name: str = "group") -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.__dict__[name] = group
        self.take_backend(group)

    def take_backend(self, group: dist.ProcessGroup) -> None:
        """What Megatron has bound before anything is patched calls the wrapper itself."""
        cpu, gloo = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
        self._register_backend(cpu, gloo, group._get_backend(cpu))
        self._set_default_backend(gloo)

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__.get("group") or self.__dict__["inner_group"], name)

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.size()


@contextlib.contextmanager
def collectives_that_unwrap() -> Iterator[None]:
    """``torch.distributed`` as slime patches it: every function takes wrapped groups, too."""
    names = ("get_rank get_world_size get_backend get_global_rank get_group_rank get_process_group_ranks all_reduce "
             "all_gather all_gather_into_tensor _all_gather_base all_to_all_single broadcast reduce_scatter_tensor "
             "_reduce_scatter_base barrier").split()  # fmt: skip

    def taking(function):
        def take(*args, **kwargs):
            args = [one.group if isinstance(one, Wrapped) else one for one in args]
            kwargs = {name: one.group if isinstance(one, Wrapped) else one for name, one in kwargs.items()}
            return function(*args, **kwargs)

        return take

    with contextlib.ExitStack() as stack:
        for name in names:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, taking(getattr(dist, name))))
        yield


class Trials:
    """Counts what is compared and timed: decisions that were made, not remembered."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Trials:
        native = decide_module.probe

        def probe(*args, **kwargs):
            self.count += 1
            return native(*args, **kwargs)

        self._patch = mock.patch.object(decide_module, "probe", probe)
        self._patch.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._patch.stop()

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


def doors(name: str) -> dict[str, object]:
    """What takes a group from outside, with one that wraps another under ``name``, and with one that wraps none."""
    from ditron_train.runtime.groups import is_destroyed
    from ditron_train.symm.exchange import exchange
    from ditron_train.tp import get_tp_context

    group = dist.new_group()
    wrapped, empty, found = Wrapped(group, name), Wrapped(group, name), {}
    empty.__dict__[name] = None
    for door, call in (
        ("context", lambda one: get_tp_context(one, torch.device("cpu")).group is group),
        ("exchange", lambda one: exchange(one, dist.get_rank())),
        ("is_destroyed", is_destroyed),
    ):
        for which, one in (("wrapped", wrapped), ("empty", empty)):
            try:
                found[f"{door} {which}"] = call(one)
            except Exception as error:
                found[f"{door} {which}"] = f"{type(error).__name__}: {error}"
    from ditron_train.symm import close_all_arenas

    close_all_arenas()
    return found


def slime_like(rollouts: int) -> dict[str, object]:
    """Groups in wrappers that live as long as the model; before each rollout they are destroyed and a memory saver
    pauses, afterwards they are made again. Log-probabilities, then training, on packed lengths."""
    from megatron.core import parallel_state

    import ditron_train.megatron as ditron
    from tests.support.model_parallel import model_parallel

    saver = ModuleType("torch_memory_saver")
    saver.TorchMemorySaver = type("TorchMemorySaver", (), {"pause": lambda self: None})
    ranks = list(range(dist.get_world_size()))
    losses: list[float] = []
    held, trials_of, exchanges = [], [], []
    native = []
    with model_parallel(tensor_model_parallel_size=len(ranks)), mock.patch.dict(sys.modules, {saver.__name__: saver}):
        tp = Wrapped(dist.new_group(ranks))
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = tp
        with collectives_that_unwrap():
            model = models.gpt()
            for turn in range(rollouts):
                native += [models.log_probs(model, 16, turn), models.train(model, 16, turn)]
            ditron.apply(features="tp")
            model = models.gpt()
            with Trials() as trials, Lines() as lines:
                for turn in range(rollouts):
                    losses += [models.log_probs(model, 16, turn), models.train(model, 16, turn)]
                    trials_of.append(trials.take())
                    exchanges.append(sum(answer.context is not None for answer in gate.answers("tp")))
                    before = peak_bytes()
                    saver.TorchMemorySaver().pause()
                    held.append((before, peak_bytes()))
                    dist.destroy_process_group(tp.group)
                    tp.__dict__["group"] = None
                    tp.__dict__["group"] = dist.new_group(ranks)
                    tp.take_backend(tp.group)
    return dict(native=native, losses=losses, held=held, trials=trials_of, fused=exchanges, lines=lines)


def offloaded_and_remade(as_user: bool) -> dict[str, object]:
    """verl's offload between steps (storages resized to 0, other memory in their place), then NeMo-RL's new groups in
    one process: parallel state and WORLD destroyed and made again, a new model. ``as_user``: with features on."""
    from megatron.core import parallel_state

    import ditron_train.megatron as ditron
    from ditron_train.cpu.megatron_shim import megatron_on_cpu

    size = dist.get_world_size()
    found: dict[str, object] = {}
    with megatron_on_cpu(), Trials() as trials:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        if as_user:
            ditron.apply(features="tp")
        model = models.gpt()
        first = [models.train(model, length) for length in (16, 20)]
        found["first trials"] = trials.take()
        kept = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
        for parameter, _ in kept:
            parameter.untyped_storage().resize_(0)
        elsewhere = [torch.ones(values.numel()) for _, values in kept]
        for parameter, values in kept:
            parameter.untyped_storage().resize_(values.nbytes)
            parameter.data.copy_(values)
        del elsewhere
        found["losses"] = [*first, models.train(model, 16, 1), models.log_probs(model, 20, 1)]
        del model, kept
        gc.collect()
        parallel_state.destroy_model_parallel()
        dist.barrier()
        dist.destroy_process_group()
        found["held"] = peak_bytes()
        store = dist.FileStore(os.environ["DITRON_TEST_STORE"] + ".again", size)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=size)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        trials.take()
        model = models.gpt()
        found["again"] = [models.train(model, length) for length in (16, 20)]
        found["again trials"] = trials.take()
        found["first"] = first
        found["fused"] = sum(answer.context is not None for answer in gate.answers("tp"))
        ditron.restore()
    return found


def released(times: int) -> dict[str, object]:
    """``release`` between steps, with a graph's memory once."""
    import ditron_train.megatron as ditron
    from ditron_train.tp import get_tp_context
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()), Trials() as trials:
        ditron.release()  # nothing is there
        ditron.apply(features="tp")
        model = models.gpt()
        losses, held = [models.train(model, 16, 0, lr=0.0)], [peak_bytes()]
        trials.take()
        for _ in range(times):
            ditron.release()
            assert peak_bytes() == 0
            losses.append(models.train(model, 16, 0, lr=0.0))
            held.append(peak_bytes())
        from megatron.core import parallel_state

        context = get_tp_context(parallel_state.get_tensor_model_parallel_group(), torch.device("cpu"))
        context.arena.graph_captured = True  # as when a graph was captured
        with Lines() as lines:
            ditron.release()
        kept = peak_bytes()
        losses.append(models.train(model, 16, 0, lr=0.0))
        return dict(losses=losses, held=held, kept=kept, trials=trials.take(), lines=lines)


def remembered_by_some() -> list[int]:
    """Trials where one rank has forgotten what it decided: all ranks decide again, together."""
    from megatron.core import parallel_state

    import ditron_train.megatron as ditron
    from ditron_train.policy.decide import forget_decided
    from tests.support.model_parallel import destroy_groups, model_parallel

    counts = []
    with Trials() as trials:
        for forgets in (False, True):
            with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
                ditron.apply(features="tp")
                models.train(models.gpt(), 16)
                counts.append(trials.take())
                destroy_groups()
                if dist.get_rank() == 1 or forgets:
                    forget_decided()
                parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
                models.train(models.gpt(), 16)
                counts.append(trials.take())
    return counts


def decided_by_mode() -> dict[str, object]:
    """What is tried for calls without gradients and for training, in either order."""
    import ditron_train.megatron as ditron
    from tests.support.model_parallel import model_parallel

    found: dict[str, object] = {}
    for order in ("evaluation first", "training first"):
        with model_parallel(tensor_model_parallel_size=dist.get_world_size()), Trials() as trials, Lines() as lines:
            ditron.apply(features="tp")
            model = models.gpt()
            counts = []
            for is_training in (False, True) if order == "evaluation first" else (True, False):
                if is_training:
                    models.train(model, 16)
                else:
                    models.log_probs(model, 16, mode=torch.inference_mode)
                counts.append(trials.take())
            models.log_probs(model, 16)
            counts.append(trials.take())
            found[order] = counts, [line for line in lines if ": fused, " in line]
    return found
