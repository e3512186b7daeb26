"""Bodies of the pipeline tests: a small GPT trained by megatron-core's schedules, natively and with our
communicator."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY, SEQUENCE, BATCH = 32, 12, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """One schedule."""

    pipeline: int
    microbatches: int
    chunks: int | None = None
    group_size: int | None = None
    forward_only: bool = False
    variable: bool = False
    tied: bool = False
    batched: bool = False
    dtype: torch.dtype = torch.float32
    tensor: int = 1
    device: str = "cpu"
    growth: int = 0  # of the first microbatch, from step to step (``variable``)
    short_first: bool = False  # the shortest microbatch comes first (``variable``)


def _config(case: Case, overlap: bool, warmup_flush: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    from ditron_train.cpu.megatron_shim import CPU_CONFIG

    options = (
        dict(CPU_CONFIG)
        if case.device == "cpu"
        else {"gradient_accumulation_fusion": False, "deterministic_mode": True}
    )
    return TransformerConfig(
        num_layers=2 * case.pipeline * (case.chunks or 1) // (2 if case.chunks else 1),
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=case.dtype,
        bf16=case.dtype == torch.bfloat16,
        pipeline_dtype=case.dtype,
        tensor_model_parallel_size=case.tensor,
        sequence_parallel=case.tensor > 1,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.chunks,
        microbatch_group_size_per_vp_stage=case.group_size or (case.pipeline if case.chunks else None),
        variable_seq_lengths=case.variable,
        moe_token_dispatcher_type="alltoall" if case.variable else "allgather",
        deallocate_pipeline_outputs=True,
        batch_p2p_comm=case.batched and not overlap,
        overlap_p2p_comm=overlap,
        overlap_p2p_comm_warmup_flush=warmup_flush,
        **options,
    )


def _models(case: Case, config: Any) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from ditron_train.cpu import megatron_shim as megatron_cpu

    megatron_cpu.seed(7)
    models = []
    for chunk in range(case.chunks or 1):
        stage = {} if case.chunks is None else {"vp_stage": chunk}
        first = (
            parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage)
            if stage
            else (parallel_state.is_pipeline_first_stage())
        )
        last = (
            parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage)
            if stage
            else (parallel_state.is_pipeline_last_stage())
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=case.tied,
            **stage,
        )
        models.append(model.to(case.device))
    return models


def _batches(case: Case, step: int) -> list[tuple]:
    generator = torch.Generator().manual_seed(100 + step)
    batches = []
    for index in range(case.microbatches):
        length = SEQUENCE - (3 * index) % 8 if case.variable else SEQUENCE
        if index == 0:
            length += case.growth * step
        tokens = torch.randint(0, VOCABULARY, (BATCH, length + 1), generator=generator).to(case.device)
        positions = torch.arange(length, device=case.device).expand(BATCH, length)
        mask = torch.ones(length, length, device=case.device).triu(1).bool()[None, None]
        batches.append((tokens[:, :-1], positions, mask, tokens[:, 1:]))
    return sorted(batches, key=lambda batch: batch[1].shape[1]) if case.short_first else batches


def _forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens, positions, mask, labels = next(iterator)
    output = model(tokens, positions, mask, labels=labels)

    def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, dict]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_function


def _sum_tied_gradients(models: list[Any]) -> None:
    from megatron.core import parallel_state

    if not parallel_state.is_rank_in_embedding_group():
        return
    for model in models:
        if model.pre_process or model.post_process:
            weight = model.shared_embedding_or_output_weight()
            dist.all_reduce(weight.grad, group=parallel_state.get_embedding_group())


def train(case: Case, overlap: bool = False, warmup_flush: bool = False, steps: int = 2) -> list[torch.Tensor]:
    """Losses of every microbatch of every step and, at the end, all parameters of this rank."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = _config(case, overlap, warmup_flush)
    models = _models(case, config)
    run_schedule = get_forward_backward_func()
    seen = []
    for step in range(steps):
        iterators = [iter(_batches(case, step)) for _ in models]
        losses = run_schedule(
            forward_step_func=_forward_step,
            data_iterator=iterators if case.chunks else iterators[0],
            model=models if case.chunks else models[0],
            num_microbatches=case.microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=case.forward_only,
        )
        seen += [entry["loss"].clone() for entry in losses]
        if case.forward_only:
            continue
        if case.tied:
            _sum_tied_gradients(models)
        with torch.no_grad():
            for model in models:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return seen + [parameter.detach().clone() for model in models for parameter in model.parameters()]


def messages_of_fused() -> int:
    """How many messages our contexts have sent from this rank, without what the policy tried: one for each size."""
    from ditron_train.policy import gate
    from ditron_train.pp.context import _contexts

    contexts = [context for context in _contexts.values() if not context.closed]
    senders = [sender for context in contexts for sender in context.local_senders if sender is not None]
    tried = sum(len(gate.answers("pp", context.group)) for context in contexts)
    return sum(sender.messages for sender in senders) - tried


def equal_to_native(case: Case, ways: list[tuple[bool, bool]]) -> list[int]:
    """Trains natively without overlap, then with the fused path in every way; the messages that the fused path sent in
    each."""
    import ditron_train.megatron
    from tests.support.model_parallel import model_parallel

    counts = []
    with model_parallel(
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.chunks,
    ):
        sent = messages_of_fused()  # by what another test has left in this process
        native = train(case)
        assert messages_of_fused() == sent
        for overlap, warmup_flush in ways:
            ditron_train.megatron.apply(features="pp")
            before = messages_of_fused()
            fused = train(case, overlap, warmup_flush)
            counts.append(messages_of_fused() - before)
            assert len(native) == len(fused)
            for index, (expected, seen) in enumerate(zip(native, fused)):
                assert torch.equal(expected, seen), f"entry {index} differs with overlap={overlap}"
            ditron_train.megatron.restore()
        again = train(case)
        assert all(torch.equal(expected, seen) for expected, seen in zip(native, again))
    return counts


def equal_across_nodes(case: Case, ways: list[tuple[bool, bool]]) -> list[int]:
    """The same with two ranks a node: every second link of the pipeline goes through the network."""
    import os

    os.environ["NCCL_HOSTID"] = str(dist.get_rank() // 2)
    try:
        return equal_to_native(case, ways)
    finally:
        del os.environ["NCCL_HOSTID"]


def slow_first_step(case: Case, late_s: float, late_stage: int | None = None) -> bool:
    """Every stage, or one, is late in the first step, before it sends, as where it compiles; then only as late as the
    machine is. Whether training was as natively."""
    import time

    import ditron_train.megatron
    from tests.support.model_parallel import model_parallel

    global _forward_step
    with model_parallel(pipeline_model_parallel_size=case.pipeline):
        with torch.set_grad_enabled(not case.forward_only):
            native = train(case)
        ditron_train.megatron.apply(features="pp")
        in_time = _forward_step
        lateness = [late_s] if late_stage in (None, dist.get_rank()) else []

        def late(iterator: Any, model: Any) -> Any:
            time.sleep(lateness.pop() if lateness else 0.0)
            return in_time(iterator, model)

        _forward_step = late
        try:
            with torch.set_grad_enabled(not case.forward_only):
                fused = train(case)
        finally:
            _forward_step = in_time
            ditron_train.megatron.restore()
        return all(map(torch.equal, native, fused))


def first_stage_never_comes(across_nodes: bool, newer: list[str]) -> str:
    """What the second of two stages says of a first stage that never sends: in the first step, beside ``newer``
    libraries, or between nodes in the first step with messages of another size. Deadlines are of 0.5 s."""
    import os
    from unittest import mock

    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    import ditron_train.megatron
    from ditron_train.policy import self_check as room
    from ditron_train.runtime.errors import PeerTimeoutError
    from ditron_train.symm import exchange as agreements
    from tests.support.model_parallel import model_parallel

    os.environ["NCCL_HOSTID"] = str(dist.get_rank() * across_nodes)
    least, logged = agreements._LEAST_TIMEOUT_S, "no error"
    try:
        with model_parallel(pipeline_model_parallel_size=2), mock.patch.object(room, "newer_libraries", lambda: newer):
            room.forget_self_checks()
            ditron_train.megatron.apply(features="pp")
            group = parallel_state.get_pipeline_model_parallel_group()

            def send(length: int) -> None:
                communicator = P2PCommunicator(group, _config(Case(2, 2), False, False))
                if group.rank() == 0:
                    communicator.send_forward(torch.ones(length, BATCH, 32), is_last_stage=False)
                else:
                    communicator.recv_forward((length, BATCH, 32), is_first_stage=False)

            if across_nodes:
                send(4)
            dist.barrier()
            agreements._LEAST_TIMEOUT_S, os.environ["DITRON_TIMEOUT_S"] = 0.5, "0.5"
            try:
                if group.rank() == 1:
                    send(8)
            except PeerTimeoutError as error:
                logged = str(error)
            dist.barrier()
            ditron_train.megatron.restore()
    finally:
        room.forget_self_checks()
        agreements._LEAST_TIMEOUT_S = least
        del os.environ["NCCL_HOSTID"]
        os.environ.pop("DITRON_TIMEOUT_S", None)
    return logged


def falls_back(case: Case, change: dict[str, Any]) -> int:
    """A configuration that is not covered runs natively; returns the messages that the fused path sent."""
    import ditron_train.megatron
    from tests.support.model_parallel import model_parallel

    with model_parallel(pipeline_model_parallel_size=case.pipeline):
        native = train(case)
        ditron_train.megatron.apply(features="pp")
        from megatron.core.pipeline_parallel import schedules

        from ditron_train.megatron.pp import communicator as pp

        reason = change.pop("reason")
        original = pp.unsupported_reason_group
        pp.unsupported_reason_group = lambda group, config: reason
        try:
            fused = train(case)
        finally:
            pp.unsupported_reason_group = original
        assert type(schedules.P2PCommunicator.__new__(schedules.P2PCommunicator, None)) is pp.DitronP2PCommunicator
        assert all(torch.equal(expected, seen) for expected, seen in zip(native, fused))
        return messages_of_fused()


def a_plan_decides(case: Case, path: str) -> list[tuple[bool, bool]]:
    """Trains with a plan file that is made, and with one that says native; whether the fused path sent anything and
    all was equal."""
    import json
    import os

    import ditron_train.megatron
    from ditron_train.policy import gate
    from tests.support.model_parallel import model_parallel

    os.environ["DITRON_PLAN"] = path
    seen = []
    try:
        with model_parallel(pipeline_model_parallel_size=case.pipeline):
            native = train(case)
            for _ in range(2):
                gate.forget("pp")
                ditron_train.megatron.apply(features="pp")
                before = messages_of_fused()
                fused = train(case)
                seen.append((messages_of_fused() > before, all(map(torch.equal, native, fused))))
                ditron_train.megatron.restore()  # plans are read again after it
                dist.barrier()
                if dist.get_rank() == 0:
                    with open(path) as file:
                        plan = json.load(file)
                    (key,) = plan["decisions"]
                    assert key.startswith("pp send_recv") and key.endswith("2 ranks (strict)"), key
                    plan["decisions"][key]["use_ditron"] = False
                    with open(path, "w") as file:
                        json.dump(plan, file)
                dist.barrier()
    finally:
        del os.environ["DITRON_PLAN"]
    return seen


def self_check_fails(case: Case) -> tuple[int, bool, list[str]]:
    """Beside a newer library, with which the last stage cannot launch a kernel, training is native: messages of the
    fused path, whether a context was made for them, and what is logged."""
    from unittest import mock

    from megatron.core import parallel_state

    import ditron_train.megatron
    from ditron_train.policy import self_check as room
    from ditron_train.pp.context import _contexts
    from ditron_train.runtime import logs
    from tests.support.model_parallel import model_parallel

    failure = "no launch" if dist.get_rank() == case.pipeline - 1 else None
    logs.forget_decisions()
    room.forget_self_checks()
    try:
        with model_parallel(pipeline_model_parallel_size=case.pipeline):
            native = train(case)
            with (
                mock.patch.object(room, "newer_libraries", lambda: ["triton 3.99.0"]),
                mock.patch.object(room, "_launch_failure", lambda device: failure),
            ):
                ditron_train.megatron.apply(features="pp")
                fused = train(case)
                ditron_train.megatron.restore()
            assert all(map(torch.equal, native, fused))
            group = parallel_state.get_pipeline_model_parallel_group()
            made = any(context.group is group for context in _contexts.values())
            return messages_of_fused(), made, [line for line in logs.decisions() if "self-check" in line]
    finally:
        room.forget_self_checks()


def context_cannot_be_made(case: Case, name: str) -> tuple[int, list[str]]:
    """Making a context meets an error that nobody foresees, on every rank: training is native; messages of the fused
    path, and what is logged."""
    from unittest import mock

    import ditron_train.megatron
    from ditron_train.runtime import logs
    from tests.support.model_parallel import model_parallel

    logs.forget_decisions()
    with model_parallel(pipeline_model_parallel_size=case.pipeline):
        native = train(case)
        with mock.patch(f"ditron_train.pp.{name}", side_effect=TypeError("no such argument")):
            ditron_train.megatron.apply(features="pp")
            fused = train(case)
            ditron_train.megatron.restore()
        assert all(map(torch.equal, native, fused))
        return messages_of_fused(), logs.decisions()


def no_memory(case: Case) -> int:
    """No room for the slots: the same on all ranks, and training goes on natively."""
    import os

    import ditron_train.megatron
    from tests.support.model_parallel import model_parallel

    os.environ["DITRON_ARENA_BYTES"] = "4096"
    try:
        with model_parallel(pipeline_model_parallel_size=case.pipeline):
            native = train(case)
            ditron_train.megatron.apply(features="pp")
            fused = train(case)
            assert all(torch.equal(expected, seen) for expected, seen in zip(native, fused))
            return messages_of_fused()
    finally:
        del os.environ["DITRON_ARENA_BYTES"]


def no_memory_on_one_node(case: Case, caps: list[str | None], capped: tuple[int, ...]) -> list[tuple[int, list[str]]]:
    """Two nodes of two ranks, the ``capped`` one with these caps in turn: training goes on, the same on all ranks;
    messages of the fused path, and what is logged of those that are native."""
    import os

    import ditron_train.megatron
    from ditron_train.runtime import logs
    from tests.support.model_parallel import model_parallel

    rank, found = dist.get_rank(), []
    os.environ["NCCL_HOSTID"] = str(rank // 2)
    try:
        with model_parallel(pipeline_model_parallel_size=case.pipeline):
            native = train(case)
            for cap in caps:
                logs.forget_decisions()
                if cap is not None and rank in capped:
                    os.environ["DITRON_ARENA_BYTES"] = cap
                ditron_train.megatron.apply(features="pp")
                fused = train(case)
                assert all(map(torch.equal, native, fused))
                found.append((messages_of_fused(), [line for line in logs.decisions() if ": native, " in line]))
                ditron_train.megatron.restore()
                os.environ.pop("DITRON_ARENA_BYTES", None)
    finally:
        del os.environ["NCCL_HOSTID"]
        os.environ.pop("DITRON_ARENA_BYTES", None)
    return found


def bad_input() -> list[str]:
    """What native raises, the fused path raises."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    import ditron_train.megatron
    from tests.support.model_parallel import model_parallel

    logged = []
    with model_parallel(pipeline_model_parallel_size=2):
        ditron_train.megatron.apply(features="pp")
        case = Case(2, 2)
        config = _config(case, False, False)
        group = parallel_state.get_pipeline_model_parallel_group()
        for dtype, shape in ((None, (1, 2, 3)), (torch.float32, None)):
            config.pipeline_dtype = dtype
            try:
                P2PCommunicator(group, config)._communicate(
                    tensor_send_next=None, tensor_send_prev=None, recv_prev=True, recv_next=False, tensor_shape=shape
                )
            except RuntimeError as error:
                logged.append(str(error))
    return logged


def kept_communicator(lengths: list[int], variable: bool = False) -> int:
    """One communicator for several steps, whose messages have other sizes (``variable``: than all say); how many were
    fused."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    import ditron_train.megatron
    from tests.support.model_parallel import model_parallel

    with model_parallel(pipeline_model_parallel_size=2):
        ditron_train.megatron.apply(features="pp")
        group = parallel_state.get_pipeline_model_parallel_group()
        communicator = P2PCommunicator(group, _config(Case(2, 2, variable=variable), False, False))
        for step, length in enumerate(lengths):
            shape = (4 if variable else length, BATCH, 32)
            for microbatch in range(2):
                expected = torch.full((length, BATCH, 32), 10.0 * step + microbatch)
                if group.rank() == 0:
                    communicator.send_forward(expected, is_last_stage=False)
                    received = communicator.recv_backward(shape, is_last_stage=False)
                else:
                    received = communicator.recv_forward(shape, is_first_stage=False)
                    communicator.send_backward(expected, is_first_stage=False)
                assert torch.equal(received, expected)
        count = messages_of_fused()
        ditron_train.megatron.restore()
    return count


def deadlines(case: Case, steps: list[bool], kept: bool) -> list[list[int]]:
    """How many deadlines evaluations (True) and training steps wait for their messages, with one communicator for all
    (``kept``) or one each."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    import ditron_train.megatron
    from ditron_train.megatron.pp import communicator as fused
    from tests.support.model_parallel import model_parallel

    with model_parallel(pipeline_model_parallel_size=case.pipeline):
        ditron_train.megatron.apply(features="pp")
        group, seen = parallel_state.get_pipeline_model_parallel_group(), []
        native_exchange = fused.exchange

        def watched(context: Any, **messages: Any) -> Any:
            seen[-1].append(context.channel.turns)
            return native_exchange(context, **messages)

        fused.exchange = watched
        try:
            config = _config(case, False, False)
            models = _models(case, config)
            given: dict[str, Any] = {}
            if kept:
                given["p2p_communicator"] = P2PCommunicator(group, config)
                given["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
            for step, forward_only in enumerate(steps):
                seen.append([])
                with torch.set_grad_enabled(not forward_only):
                    get_forward_backward_func()(
                        forward_step_func=_forward_step, data_iterator=iter(_batches(case, step)), model=models[0],
                        num_microbatches=case.microbatches, seq_length=SEQUENCE, micro_batch_size=BATCH,
                        forward_only=forward_only, **given,
                    )  # fmt: skip
        finally:
            fused.exchange = native_exchange
            ditron_train.megatron.restore()
    return [sorted(set(turns)) for turns in seen]


def slots_to_lease(change: dict[str, Any]) -> tuple[tuple[int, ...], bool]:
    """Slots to lease, by lane, under a changed configuration, and whether a message arrived."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    import ditron_train.megatron
    from ditron_train.pp import get_pipeline_context
    from tests.support.model_parallel import model_parallel

    with model_parallel(pipeline_model_parallel_size=2):
        ditron_train.megatron.apply(features="pp")
        group, config = parallel_state.get_pipeline_model_parallel_group(), _config(Case(2, 2), False, False)
        for name, value in change.items():
            setattr(config, name, value)
        communicator, sent, is_first = P2PCommunicator(group, config), torch.ones(4, BATCH, 32), group.rank() == 0
        received = communicator.recv_forward(tuple(sent.shape), is_first)
        communicator.send_forward(sent, not is_first)
        slots = get_pipeline_context(group, torch.device("cpu")).slots
        ditron_train.megatron.restore()
    assert slots is not None
    return slots.leases, is_first or torch.equal(received, sent)


def several_sizes_in_a_step() -> int:
    """Lists of shapes and calls of several sizes, behind a small message, natively and then fused; how many messages
    were fused."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    import ditron_train.megatron
    from tests.support.model_parallel import model_parallel

    stages, small, large = 3, (4, BATCH, 8), (20, BATCH, 8)

    def step() -> list[torch.Tensor]:
        group = parallel_state.get_pipeline_model_parallel_group()
        communicator = P2PCommunicator(group, _config(Case(stages, 2), False, False))
        rank, shapes = group.rank(), [small, large, small]
        received = communicator.recv_forward(shapes, rank == 0)
        sent = [torch.full(shape, 1.0) for shape in shapes] if rank == 0 else [tensor + 1 for tensor in received]
        communicator.send_forward(sent, rank == stages - 1)
        around = [small, large, small]  # by receiver: a stage sends one size and receives another
        for wait in (True, False):
            to_next = torch.full(around[(rank + 1) % stages], float(rank))
            received = communicator.send_forward_recv_forward(to_next, True, around[rank], overlap_p2p_comm=not wait)
            tensor, handles = (received, {}) if wait else received
            for handle in handles.values():
                handle.wait()
            sent.append(tensor)
        return [tensor.detach().clone() for tensor in sent]

    with model_parallel(pipeline_model_parallel_size=stages):
        native = step()
        ditron_train.megatron.apply(features="pp")
        assert all(map(torch.equal, native, step()))
        count = messages_of_fused()
        ditron_train.megatron.restore()
    return count


def lengths_that_nobody_says(case: Case, steps: int, lacks_memory: int | None = None) -> list[tuple[int, int]]:
    """Training whose schedule says no shape, as without interleaving since 0.17: equal to native; of each step the
    bytes of a slot at its end and how many batches of messages went by the network. ``lacks_memory``: a rank."""
    from unittest import mock

    from megatron.core.pipeline_parallel import schedules

    import ditron_train.megatron
    from ditron_train.pp.context import PipelineContext, _contexts
    from ditron_train.pp.network import NetworkLanes
    from tests.support.model_parallel import model_parallel

    has_memory = dist.get_rank() != lacks_memory
    sent, seen, batch, made = [0], [], NetworkLanes.batch, _batches

    def counted(self: NetworkLanes, *arguments: Any) -> Any:
        sent[0] += 1
        return batch(self, *arguments)

    def step_begins(case: Case, step: int) -> list[tuple]:
        held = [context for context in _contexts.values() if not context.closed]
        seen.append((held[0].slot_bytes if held else 0, sent[0]))
        return made(case, step)

    with model_parallel(pipeline_model_parallel_size=case.pipeline):
        with mock.patch.object(schedules, "get_tensor_shapes", lambda **options: [()]):
            native = train(case, steps=steps)
            ditron_train.megatron.apply(features="pp")
            with (
                mock.patch.object(NetworkLanes, "batch", counted),
                mock.patch.object(PipelineContext, "_has_memory", lambda context, num_bytes: has_memory),
                mock.patch.dict(train.__globals__, _batches=step_begins),
            ):
                fused = train(case, steps=steps)
                step_begins(case, steps)
            ditron_train.megatron.restore()
    assert len(native) == len(fused) and all(map(torch.equal, native, fused))
    return [(after, total - before) for (_, before), (after, total) in zip(seen, seen[1:])]
