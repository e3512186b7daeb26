"""What workers do for `test_megatron_bridge`: its own provider builds and wraps the model."""

from __future__ import annotations

import os
import sys
import types

import torch
import torch.distributed as dist

from tests.reach import models
from tests.reach.bodies_activation import Lines


def _import_provider():
    """Megatron-Bridge's ``GPTModelProvider``, without what its packages import besides (Transformer Engine)."""
    folder = os.environ["MEGATRON_BRIDGE"]
    sys.path.append(folder)
    for name in (
        "megatron.bridge",
        "megatron.bridge.models",
        "megatron.bridge.models.common",
        "megatron.bridge.utils",
    ):
        shell = types.ModuleType(name)
        shell.__path__ = [os.path.join(folder, *name.split("."))]
        sys.modules[name] = shell
    import megatron

    megatron.__path__ = [*megatron.__path__, os.path.join(folder, "megatron")]
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    return GPTModelProvider


def losses_of_a_provider(options: dict[str, object]) -> tuple[bool, list[float], list[str]]:
    """Groups, model and wrapping are Megatron-Bridge's own; the package is switched on by ``DITRON`` alone."""
    from ditron_train.cpu.megatron_shim import CPU_CONFIG, megatron_on_cpu
    from ditron_train.hook import arm
    from ditron_train.symm import close_all_arenas

    arm()
    with megatron_on_cpu(), Lines() as lines:
        provider_class = _import_provider()
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        provider = provider_class(
            num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, vocab_size=models.VOCABULARY,
            seq_length=64, make_vocab_size_divisible_by=1, attention_dropout=0.0, hidden_dropout=0.0,
            add_bias_linear=False, normalization="RMSNorm", position_embedding_type="rope",
            share_embeddings_and_output_weights=False, tensor_model_parallel_size=dist.get_world_size(),
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            variable_seq_lengths=True, moe_token_dispatcher_type="alltoall",
            **{**CPU_CONFIG, "sequence_parallel": True, **options},
        )  # fmt: skip
        provider.finalize()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
        models.seed()
        model = provider.provide(pre_process=True, post_process=True)
        losses = [models.log_probs(model, 16), models.train(model, 16), models.train(model, 20)]
        dist.barrier()
        close_all_arenas()
    torch.set_default_device("cpu")
    return models.is_fused(model), losses, lines
