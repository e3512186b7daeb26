"""Megatron-LM's own ``pretrain_gpt.py`` on CPU processes: the shim, and what its training loop asks a GPU besides.

torchrun ... -m ditron_train.megatron.run megatron_lm_on_cpu.py <Megatron-LM's arguments> --distributed-backend gloo
"""

import os
import runpy
import sys
import types

import torch

from ditron_train.cpu import interpreter
from ditron_train.cpu import megatron_shim as megatron_cpu

interpreter.install()
megatron_cpu.install()
megatron_cpu.allow_torch_norm_with_sequence_parallel()
PROPERTIES = types.SimpleNamespace(major=9, minor=0, total_memory=1 << 30, multi_processor_count=8)
ANSWERS = {
    "is_available": True,
    "device_count": 8,
    "get_device_properties": PROPERTIES,
    "get_device_capability": (9, 0),
    "set_device": None,
    "synchronize": None,
    "mem_get_info": (1 << 29, 1 << 30),
    "memory_stats": {},
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
}
for name, answer in ANSWERS.items():
    setattr(torch.cuda, name, lambda *args, answer=answer: answer)

from megatron.training import initialize  # noqa: E402  (asks for the GPU on import)

initialize._compile_dependencies = lambda: None  # its fused kernels; the index of a mock dataset comes with the wheel
script = os.path.join(os.environ["MEGATRON_LM"], "pretrain_gpt.py")
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
