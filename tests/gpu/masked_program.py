"""One rank of a job whose processes see one GPU each, as Ray starts them (`test_masked` does); its environment names
the ranks, ``MODE`` what is compared. The last line that it prints is what it found, as JSON.

``tp``: a column and a row layer. ``gpt``: a GPT's loss and gradients, and log-probabilities without gradients.
``release``: memory while ``release`` and a step alternate.
"""

from __future__ import annotations

import gc
import json
import os
from typing import Any

import torch
import torch.distributed as dist


def _config(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=2, hidden_size=1024, num_attention_heads=8, add_bias_linear=False, normalization="RMSNorm",
        attention_dropout=0.0, hidden_dropout=0.0, bias_dropout_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False, gradient_accumulation_fusion=False, params_dtype=torch.bfloat16, bf16=True,
        tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=True, deterministic_mode=True, **options,
    )  # fmt: skip


def _model() -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from ditron_train.cpu import megatron_shim

    megatron_shim.seed(5)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(_config(), spec, 2048, 1024, position_embedding_type="rope",
                    share_embeddings_and_output_weights=False).cuda()  # fmt: skip


def _step(model: torch.nn.Module, with_gradients: bool = True) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 2048, (2, 1025), generator=torch.Generator().manual_seed(3)).cuda()
    mask = torch.ones(1024, 1024, dtype=torch.bool, device="cuda").triu(1)[None, None]
    positions = torch.arange(1024, device="cuda").expand(2, 1024)
    with torch.set_grad_enabled(with_gradients):
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
    if not with_gradients:
        return {"log probs": loss}
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def _layers() -> dict[str, torch.Tensor]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from ditron_train.cpu import megatron_shim

    megatron_shim.seed(3)  # of the weights
    results = {}
    for name, cls, shape, options in (
        ("column", ColumnParallelLinear, (1024, 1, 2048), dict(gather_output=False)),
        ("row", RowParallelLinear, (2048, 1, 1024), dict(input_is_parallel=True)),
    ):
        torch.manual_seed(7 + dist.get_rank())
        layer = cls(2048, 2048, config=_config(), init_method=torch.nn.init.normal_, bias=False, skip_bias_add=False,
                    is_expert=False, **options)  # fmt: skip
        x = torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        out, _ = layer(x)
        out.backward(torch.randn_like(out))
        results |= {f"{name} out": out.detach(), f"{name} dgrad": x.grad, f"{name} wgrad": layer.weight.grad}
    return results


def _compare(run: Any) -> dict[str, Any]:
    import ditron_train.megatron as ditron
    from ditron_train.policy import gate

    native, again = run(), run()
    ditron.apply(features="tp")
    fused = run()
    repeated = [name for name in native if torch.equal(native[name], again[name])]
    return dict(
        differing=[name for name in repeated if not torch.equal(native[name], fused[name])],
        repeated=len(repeated),
        all=len(native),
        fused=sum(answer.context is not None for answer in gate.answers("tp")),
    )


def _gpt() -> dict[str, torch.Tensor]:
    model = _model()
    return {**_step(model, with_gradients=False), **_step(model)}


def _release() -> dict[str, Any]:
    import ditron_train.megatron as ditron
    from ditron_train.policy import gate
    from ditron_train.symm.arena import peak_bytes

    ditron.apply(features="tp")
    model = _model()
    awake, asleep, losses = [], [], []
    for _ in range(12):
        losses.append(_step(model)["loss"].item())
        held = peak_bytes(), sum(answer.context is not None for answer in gate.answers("tp"))
        awake.append(_used())
        ditron.release()
        assert peak_bytes() == 0
        asleep.append(_used())
    return dict(awake=awake, asleep=asleep, losses=losses, held=held[0], fused=held[1])


def _used() -> int:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    from megatron.core import parallel_state

    from ditron_train.cpu import megatron_shim

    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    megatron_shim.seed(1)
    megatron_shim.allow_torch_norm_with_sequence_parallel()
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    mode = os.environ["MODE"]
    found = _release() if mode == "release" else _compare(_layers if mode == "tp" else _gpt)
    found["devices"] = torch.cuda.device_count()
    dist.barrier()
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
