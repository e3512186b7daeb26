"""Megatron-LM's ``pretrain_gpt.py`` with two lines changed, for those who keep a script of their own.

Needs the Megatron-LM repository (tag core_v0.16.1) on ``PYTHONPATH``: ``megatron.training`` is not in the wheel.

    torchrun --nproc-per-node 8 examples/megatron/pretrain_gpt_two_lines.py <Megatron's arguments> --ditron tp
"""

from __future__ import annotations

from functools import partial

try:
    from gpt_builders import gpt_builder
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from model_provider import model_provider
    from pretrain_gpt import forward_step, get_embedding_ranks, train_valid_test_datasets_provider
except ModuleNotFoundError as error:
    raise SystemExit(f"error: no module {error.name}: PYTHONPATH has to name the Megatron-LM repository") from None

from ditron_train.megatron import add_ditron_args, wrap_model_provider

if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        wrap_model_provider(partial(model_provider, gpt_builder)),  # first line
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        extra_args_provider=add_ditron_args,  # second line
        get_embedding_ranks=get_embedding_ranks,
    )
