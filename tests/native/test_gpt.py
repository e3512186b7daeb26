"""A whole GPT, native and with our layers: losses and gradients bit for bit, checkpoints in both directions."""

import pytest
import torch
import torch.distributed as dist

from tests.support.exact import exact_sums
from tests.support.processes import run_workers

pytest.importorskip("megatron.core")

VOCABULARY, SEQUENCE, BATCH = 64, 16, 2


def _config(**options):
    from megatron.core.transformer import TransformerConfig

    from ditron_train.cpu.megatron_shim import CPU_CONFIG

    settings = {
        "sequence_parallel": True,
        "add_bias_linear": True,
        "params_dtype": torch.float32,
        **CPU_CONFIG,
        **options,
    }
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=dist.get_world_size(),
        **settings,
    )


def _model(config, spec=None, share_embeddings=False):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from ditron_train.cpu import megatron_shim as megatron_cpu

    megatron_cpu.seed(11)
    return GPTModel(
        config,
        spec or get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=share_embeddings,
    )


def _loss_and_gradients(model):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
    loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return loss.item(), gradients


def _assert_same_bits(native, fused):
    assert native[0] == fused[0]
    assert native[1].keys() == fused[1].keys()
    for name, expected in native[1].items():
        assert torch.equal(expected, fused[1][name]), name


def _num_fused(model):
    return sum(type(module).__qualname__.startswith("Ditron") for module in model.modules())


def _num_op_shapes():
    from ditron_train.policy import gate

    return sum(answer.context is not None for answer in gate.answers("tp"))


@exact_sums()
def _train_both_ways(way, share_embeddings, dtype):
    import ditron_train.megatron
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        options = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
        native = _loss_and_gradients(_model(_config(**options), share_embeddings=share_embeddings))
        if way == "spec":
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

            model = _model(
                _config(**options), ditron_train.megatron.apply(get_gpt_layer_local_spec()), share_embeddings
            )
            assert _num_fused(model) == 8
        else:
            assert ditron_train.megatron.apply(features="tp") is None
            model = _model(_config(**options), share_embeddings=share_embeddings)
            assert _num_fused(model) == 9  # four linear layers a layer, and the output layer
            assert type(model.output_layer).__qualname__ == "DitronColumnParallelLinear"
        _assert_same_bits(native, _loss_and_gradients(model))
        assert _num_op_shapes() == (4 if way == "spec" else 5)


@pytest.mark.parametrize("way", ["spec", "patch"])
@pytest.mark.parametrize("share_embeddings", [False, True])
def test_loss_and_every_gradient(way, share_embeddings):
    run_workers(2, _train_both_ways, way, share_embeddings, torch.float32)


@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_every_gradient_in_bf16(ranks):
    run_workers(ranks, _train_both_ways, "patch", False, torch.bfloat16)


def _train_without_sequence_parallelism():
    """cuBLAS's part is torch's on a CPU, and two ranks have one sum: bit for bit, with all-reduces overlapped."""
    import ditron_train.megatron
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        native = _loss_and_gradients(_model(_config(sequence_parallel=False)))
        ditron_train.megatron.apply()
        fused = _loss_and_gradients(_model(_config(sequence_parallel=False)))
        assert native[0] == fused[0]
        assert all(torch.equal(native[1][name], fused[1][name]) for name in native[1])
        return _num_op_shapes()


def test_without_sequence_parallelism():
    assert min(run_workers(2, _train_without_sequence_parallelism)) > 0


def _train_natively_when_not_covered(options):
    """What is not covered: the same modules run the native path, bit for bit."""
    import ditron_train.megatron
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        native = _loss_and_gradients(_model(_config(**options)))
        ditron_train.megatron.apply()
        fused = _loss_and_gradients(_model(_config(**options)))
        assert native[0] == fused[0]
        assert all(torch.equal(native[1][name], fused[1][name]) for name in native[1])
        assert _num_op_shapes() == 0


def test_not_covered_is_native_bit_for_bit():
    run_workers(1, _train_natively_when_not_covered, {"sequence_parallel": False})


def test_memory_that_does_not_fit_is_native_bit_for_bit():
    run_workers(2, _train_natively_when_not_covered, {}, env={"DITRON_ARENA_BYTES": "4096"})


def _shards(model, metadata):
    sharded = model.sharded_state_dict(metadata=metadata)
    return {
        key: (value.key, value.global_shape, value.global_offset, value.replica_id)
        for key, value in sharded.items()
        if hasattr(value, "global_offset")
    }


def _exchange_state_dicts():
    from megatron.core import parallel_state

    import ditron_train.megatron
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        native = _model(_config())
        ditron_train.megatron.apply()
        fused = _model(_config())
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        assert _shards(native, metadata) == _shards(fused, metadata) and _shards(native, metadata)
        for source, target in ((native, fused), (fused, native)):
            with torch.no_grad():
                for index, parameter in enumerate(source.parameters()):
                    parameter.add_(0.25 + index)
            assert source.state_dict().keys() == target.state_dict().keys()
            target.load_state_dict(source.state_dict())
            _assert_same_parameters(source, target)


def _exchange_distributed_checkpoints(directory):
    import os

    from megatron.core import dist_checkpointing, parallel_state

    import ditron_train.megatron
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        native = _model(_config())
        ditron_train.megatron.apply()
        fused = _model(_config())
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        for source, target, name in ((native, fused, "from_native"), (fused, native, "from_fused")):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.mul_(-0.5)
            path = os.path.join(directory, name)
            if dist.get_rank() == 0:
                os.makedirs(path)
            dist.barrier()
            dist_checkpointing.save(source.sharded_state_dict(metadata=metadata), path)
            target.load_state_dict(dist_checkpointing.load(target.sharded_state_dict(metadata=metadata), path))
            _assert_same_parameters(source, target)


def _assert_same_parameters(left, right):
    for (name, a), (other_name, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert name == other_name and torch.equal(a, b), name


def test_state_dicts_interchange():
    run_workers(2, _exchange_state_dicts)


def test_distributed_checkpoints_interchange(tmp_path):
    pytest.importorskip("psutil", reason="megatron-core writes distributed checkpoints only with psutil")
    run_workers(2, _exchange_distributed_checkpoints, str(tmp_path))
