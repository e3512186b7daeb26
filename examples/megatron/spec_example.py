"""One call on a layer spec: a Megatron-core GPT in plain Python whose linear layers overlap their communication.

    torchrun --standalone --nproc-per-node 2 examples/megatron/spec_example.py

Runs on GPUs (NCCL) or, without any, on CPU processes (gloo, Triton's interpreter, exact arithmetic on both paths).
"""

from __future__ import annotations

import logging
import os
import warnings

warnings.filterwarnings("ignore")  # megatron-core's, on what is not installed
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron asks for
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before torch and triton are imported

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

import ditron_train.megatron
from ditron_train.cpu import exact_arithmetic, interpreter
from ditron_train.cpu import megatron_shim as megatron_cpu


def main() -> None:
    """Builds the model twice, from the native spec and from the rewritten one, and compares one step."""
    if "RANK" not in os.environ:
        raise SystemExit("error: start it by torchrun --standalone --nproc-per-node 2")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("ditron_train").setLevel(logging.INFO)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        megatron_cpu.allow_torch_norm_with_sequence_parallel()
    else:
        interpreter.install()
        megatron_cpu.install()
        exact_arithmetic.install()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())

    native_spec = get_gpt_layer_local_spec()
    our_spec = ditron_train.megatron.apply(native_spec, features=("tp",))  # <- the one call
    losses = [one_step(spec, on_gpu) for spec in (native_spec, our_spec)]
    if dist.get_rank() == 0:
        logging.getLogger("ditron_train").info("loss: native %.8f, with ditron_train %.8f", *losses)
    dist.destroy_process_group()


def one_step(spec: object, on_gpu: bool) -> float:
    """The loss of one forward and backward of a small GPT."""
    megatron_cpu.seed(7)
    options = dict(megatron_cpu.CPU_CONFIG, use_cpu_initialization=not on_gpu)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=2048 if on_gpu else 64,
        num_attention_heads=16 if on_gpu else 4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=dist.get_world_size() > 1,
        **options,
    )
    length = 2048 if on_gpu else 64
    model = GPTModel(config, spec, vocab_size=256, max_sequence_length=length, position_embedding_type="rope")
    device = "cuda" if on_gpu else "cpu"
    model.to(device)
    tokens = torch.randint(0, 256, (1, length + 1), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]
    positions = torch.arange(length, device=device)[None]
    loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
    loss.backward()
    return loss.item()


if __name__ == "__main__":
    main()
