"""Small GPTs built as frameworks build them: their configuration in Python, groups by ``parallel_state`` or by
``HyperCommGrid``, microbatches of lengths that vary, log-probabilities without gradients and training on one model.

To be used inside of workers (`tests.support.processes`).
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy
import torch
import torch.distributed as dist

VOCABULARY = 64
#: Of losses with ``tp`` on a CPU: products of NumPy, in the interpreter, and of torch round in other orders. Whatever
#: else is compared here is equal bit for bit.
LOSS_BOUND = 2e-6


def gpt(collection: Any = None, *, experts: int = 0, layers: int = 1, **options: Any) -> torch.nn.Module:
    """A GPT with ``experts`` (0: dense); its groups from ``collection``, a ``ProcessGroupCollection``, if given."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from ditron_train.cpu.megatron_shim import CPU_CONFIG

    seed(collection)
    world_size = dist.get_world_size()
    if experts:
        options = dict(num_moe_experts=experts, moe_router_topk=2, moe_router_load_balancing_type="none",
                       moe_ffn_hidden_size=32, expert_model_parallel_size=world_size,
                       expert_tensor_parallel_size=1, **options)  # fmt: skip
    config = TransformerConfig(
        **{
            **dict(num_layers=layers, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, add_bias_linear=False,
                   normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
                   attention_dropout=0.0, hidden_dropout=0.0, tensor_model_parallel_size=world_size,
                   sequence_parallel=True, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall"),
            **CPU_CONFIG,
            **options,
        }
    )  # fmt: skip
    if experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    groups = {} if collection is None else {"pg_collection": collection}
    return GPTModel(config, spec, VOCABULARY, 512, position_embedding_type="rope",
                    share_embeddings_and_output_weights=False, **groups)  # fmt: skip


def seed(collection: Any = None) -> None:
    """The same parameters at every call, whoever has made the groups."""
    from megatron.core import tensor_parallel

    random.seed(7), numpy.random.seed(7), torch.manual_seed(7)
    ranks = {} if collection is None else dict(tp_rank=collection.tp.rank(), ep_rank=0, etp_rank=0)
    tensor_parallel.model_parallel_cuda_manual_seed(7, inference_rng_tracker=True, force_reset_rng=True, **ranks)


def grid_groups() -> Any:
    """A ``ProcessGroupCollection`` of tensor parallel ranks by ``HyperCommGrid``, without ``parallel_state``."""
    from megatron.core import parallel_state
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state._set_global_memory_buffer()
    world_size = dist.get_world_size()
    grid = HyperCommGrid([world_size, 1, 1, 1], ["tp", "cp", "dp", "pp"], backend="gloo")
    dense = dict(tp=["tp"], cp=["cp"], dp=["dp"], pp=["pp"], mp=["tp", "pp"], tp_cp=["tp", "cp"], dp_cp=["dp", "cp"],
                 tp_dp_cp=["tp", "dp", "cp"])  # fmt: skip
    made = {name: grid.create_pg(dimensions) for name, dimensions in dense.items()}
    grid = HyperCommGrid([1, 1, world_size, 1], ["tp", "ep", "dp", "pp"], backend="gloo")
    expert = dict(ep=["ep"], expt_tp=["tp"], tp_ep=["tp", "ep"], tp_ep_pp=["tp", "ep", "pp"], expt_dp=["dp"])
    made |= {name: grid.create_pg(dimensions) for name, dimensions in expert.items()}
    alone, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(world_size)])
    return ProcessGroupCollection(embd=alone, pos_embd=alone, **made)


@contextlib.contextmanager
def grid():
    """As ``tests.support.model_parallel``, by `grid_groups`: the shim and the groups; on exit all is gone."""
    from megatron.core import parallel_state

    import ditron_train.megatron
    from ditron_train.cpu.megatron_shim import megatron_on_cpu
    from ditron_train.symm import close_all_arenas
    from tests.support.model_parallel import destroy_groups

    with megatron_on_cpu():
        collection = grid_groups()
        # In 0.16 vocab_parallel_cross_entropy alone asks parallel_state; later ones take the group.
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = collection.tp
        try:
            yield collection
            dist.barrier()
            close_all_arenas()
        finally:
            parallel_state._TENSOR_MODEL_PARALLEL_GROUP = None
            ditron_train.megatron.restore()
            destroy_groups()


def batch(length: int, number: int = 0) -> dict[str, torch.Tensor]:
    """One packed microbatch of ``length`` tokens, as ``GPTModel`` is called with it."""
    tokens = torch.randint(0, VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(number))
    return dict(
        input_ids=tokens[:, :-1].contiguous(),
        position_ids=torch.arange(length)[None],
        attention_mask=torch.ones(length, length, dtype=torch.bool).triu(1)[None, None],
        labels=tokens[:, 1:].contiguous(),
    )


def log_probs(model: torch.nn.Module, length: int, number: int = 0, mode: Any = torch.no_grad) -> float:
    """The mean loss of a microbatch, without gradients."""
    model.eval()
    with mode():
        loss = model(**batch(length, number)).float().mean()
    model.train()
    return float(loss)


def train(model: torch.nn.Module, length: int, number: int = 0, lr: float = 0.1) -> float:
    """One step of SGD; returns the mean loss."""
    model.zero_grad()
    loss = model(**batch(length, number)).float().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad
    return float(loss)


def is_fused(model: torch.nn.Module) -> bool:
    """Whether the model has layers of the fused path."""
    return any(type(module).__module__.startswith("ditron_train.") for module in model.modules())
