"""Megatron-LM's ``pretrain_gpt.py`` with two lines changed, for those who keep a script of their own.

Needs the Megatron-LM repository (tag core_v0.16.1 or newer) on ``PYTHONPATH``: ``megatron.training`` is not in the
wheel. Since 0.18 a script parses Megatron's arguments itself, before ``pretrain``.

    torchrun --nproc-per-node 8 examples/megatron/pretrain_gpt_two_lines.py <Megatron's arguments> --ditron tp
"""

from __future__ import annotations

import inspect
from functools import partial

try:
    from gpt_builders import gpt_builder
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from model_provider import model_provider
    from pretrain_gpt import forward_step, get_embedding_ranks, train_valid_test_datasets_provider
except ModuleNotFoundError as error:
    raise SystemExit(f"error: no module {error.name}: PYTHONPATH has to name the Megatron-LM repository") from None

from ditron_train.megatron import add_ditron_args, apply_args, wrap_model_provider

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


def pretrain_up_to_0_17() -> None:
    """``pretrain`` parses the arguments."""
    pretrain(
        train_valid_test_datasets_provider,
        wrap_model_provider(partial(model_provider, gpt_builder)),  # first line
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults=DEFAULTS,
        extra_args_provider=add_ditron_args,  # second line
        get_embedding_ranks=get_embedding_ranks,
    )


def pretrain_from_0_18() -> None:
    """``pretrain`` is given what they say."""
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=add_ditron_args, args_defaults=DEFAULTS)  # first line
    apply_args(args)  # second line
    pretrain(
        pretrain_cfg_container_from_args(args),
        train_valid_test_datasets_provider,
        model_provider=partial(model_provider, gpt_builder),
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    if "extra_args_provider" in inspect.signature(pretrain).parameters:
        pretrain_up_to_0_17()
    else:
        pretrain_from_0_18()
