"""Bodies that run on the ranks of a gloo group."""

from __future__ import annotations

import copy
import logging
import os

import torch
import torch.distributed as dist

from ditron_train.optim import Muon
from ditron_train.runtime.errors import NotSupportedError

SHAPES = [(16, 24), (24, 16), (8, 40), (5,), (32, 32), (12, 8), (0, 4), (4, 4), (20, 20)]


def _parameters(seed):
    params = []
    for index, shape in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(100 * seed + index)
        param = torch.nn.Parameter(torch.randn(shape, generator=generator))
        param.grad = torch.randn(shape, generator=generator)
        params.append(param)
    return params


def sharded_equals_whole(num_steps):
    """Steps sharded over the group and, for comparison, unsharded; returns the owned indices."""
    params, alone = _parameters(1), _parameters(1)
    sharded = Muon(params, lr=0.05, shard_group=dist.group.WORLD)
    whole = Muon(alone, lr=0.05)
    for step in range(num_steps):
        for index, (a, b) in enumerate(zip(params, alone)):
            grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(1000 * step + index))
            a.grad, b.grad = grad.clone(), grad.clone()
        sharded.step()
        whole.step()
        assert all(torch.equal(a, b) for a, b in zip(params, alone))
    return [index for index, param in enumerate(params) if "momentum_buffer" in sharded.state[param]]


def copies_have_the_same_process_group():
    """A sharded optimizer and its copy, which steps further with its model's copy: whether they agree."""
    params = _parameters(1)
    optimizer = Muon(params, lr=0.05, shard_group=dist.group.WORLD)
    optimizer.step()
    theirs, again = copy.deepcopy((params, optimizer))
    for fused, their in zip(params, theirs):
        their.grad = fused.grad.clone()
    optimizer.step()
    again.step()
    return again.shard_group is dist.group.WORLD and all(torch.equal(a, b) for a, b in zip(params, theirs))


def resumed_from(rank):
    """A step, one more by an optimizer with the state that ``rank`` saved (None: each rank its own): whether it
    goes on as the first one, and what is logged."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ditron_train").addHandler(handler)
    params = _parameters(1)
    params[0].grad = None  # never has momentum
    optimizer = Muon(params, lr=0.05, shard_group=dist.group.WORLD)
    optimizer.step()
    box = [copy.deepcopy(optimizer.state_dict())]
    if rank is not None:
        dist.broadcast_object_list(box, rank)
    theirs = copy.deepcopy(params)
    for fused, their, other in zip(params, theirs, _parameters(2)):
        fused.grad, their.grad = other.grad.clone(), other.grad.clone()
    resumed = Muon(theirs, lr=0.05, shard_group=dist.group.WORLD)
    resumed.load_state_dict(box[0])
    num_states = len(resumed.state)
    optimizer.step()
    resumed.step()
    logging.getLogger("ditron_train").removeHandler(handler)
    return all(torch.equal(a, b) for a, b in zip(params, theirs)), num_states == len(box[0]["state"]), lines


def missing_gradient_does_not_hang():
    """A parameter without a gradient takes part in its round and keeps its value."""
    params = _parameters(2)
    before = params[0].detach().clone()
    params[0].grad = None
    Muon(params, lr=0.05, shard_group=dist.group.WORLD).step()
    return torch.equal(params[0], before)


def error_on_one_rank():
    """The owner of the largest matrix fails in a step: it raises and ends, and no other rank finishes the step."""
    optimizer = Muon(_parameters(3), lr=0.05, shard_group=dist.group.WORLD)
    if dist.get_rank() == 0:

        def fail(*args, **kwargs):
            raise RuntimeError("no memory")

        optimizer.apply_direction = fail
    try:
        optimizer.step()
    except RuntimeError as error:
        if str(error) == "no memory":
            os._exit(7)
        raise


def duplicated_equals_unsharded(dim):
    """Each rank holds a shard along ``dim``; the step must give the shard of the whole matrix's step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    whole = torch.nn.Parameter(torch.randn(24, 32, generator=generator))
    whole.grad = torch.randn(24, 32, generator=generator)
    shard = torch.nn.Parameter(whole.detach().chunk(world_size, dim)[rank].clone())
    shard.grad = whole.grad.chunk(world_size, dim)[rank].clone()
    shard.partition_dim = dim
    blockwise = torch.nn.Parameter(shard.detach().clone())
    blockwise.grad, blockwise.partition_dim = shard.grad.clone(), dim
    options = dict(lr=0.05, tp_group_fn=lambda param: dist.group.WORLD)
    Muon([whole], lr=0.05).step()
    Muon([shard], tp_mode="duplicated", **options).step()
    Muon([blockwise], tp_mode="blockwise", **options).step()
    same = torch.equal(shard, whole.detach().chunk(world_size, dim)[rank])
    return same, torch.equal(blockwise, shard)


def sharded_parameters_are_refused():
    """What `Muon` says of a matrix that ``fully_shard`` has sharded, and whether AdamW steps it as it steps a whole
    one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole = torch.nn.Linear(8, 6, bias=False)
    sharded = copy.deepcopy(whole)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    error = ""
    try:
        Muon(sharded.parameters())
    except NotSupportedError as raised:
        error = str(raised)
    x = torch.randn(4, 8)
    for model in (whole, sharded):
        optimizer = Muon([{"params": model.parameters(), "algorithm": "adamw"}], lr=0.05)
        model(x).square().sum().backward()
        optimizer.step()
    return error, torch.equal(sharded.weight.full_tensor(), whole.weight)
