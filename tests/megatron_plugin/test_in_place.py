"""Classes of the fused ones are Megatron's where a spec is asked for them, and themselves everywhere else."""

from __future__ import annotations

import ast
import importlib
import pathlib
import sys
from abc import ABC

import pytest
import torch

megatron = pytest.importorskip("megatron.core")

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "native"))
from te_simulated import pose_transformer_engine  # noqa: E402

from ditron_train.megatron.plugin.arguments import FEATURE_MODULES  # noqa: E402
from ditron_train.megatron.shared.in_place import EqualsBaseClass  # noqa: E402
from tests.support.processes import run_workers_once  # noqa: E402

_PACKAGE = pathlib.Path(importlib.import_module("ditron_train.megatron").__path__[0])


class _Native(ABC):  # noqa: B024
    pass


class _Fused(_Native, metaclass=EqualsBaseClass, native=_Native):
    pass


class _Users(_Fused):
    pass


def test_fused_equals_native_both_ways_and_in_lists() -> None:
    assert _Fused == _Native and _Native == _Fused and not _Fused != _Native
    assert _Fused in [int, _Native] and _Native in (_Fused,)
    assert _Fused is not _Native and _Fused != _Users and _Fused != None  # noqa: E711


def test_what_inherits_from_fused_equals_itself_alone() -> None:
    assert _Users == _Users and _Users != _Native and _Users != _Fused and _Users != None  # noqa: E711


def test_dictionaries_and_abstract_classes_keep_them_apart() -> None:
    """As ``fully_shard`` keeps the class that it makes of each, and ``isinstance`` what it has found."""
    assert {_Native: 1, _Fused: 2}[_Native] == 1 and len({_Native, _Fused}) == 2
    assert issubclass(_Fused, _Fused) and isinstance(_Users(), _Fused)
    assert not issubclass(_Native, _Fused) and not isinstance(_Native(), _Fused)


def _equal_natives(feature: str) -> None:
    for native, fused in importlib.import_module(FEATURE_MODULES[feature]).class_map().items():
        assert fused == native and native == fused and fused in [native] and hash(fused) != hash(native), fused


@pytest.mark.parametrize("feature", sorted(FEATURE_MODULES))
def test_every_class_of_every_feature_equals_its_native(feature: str) -> None:
    (outcome,) = run_workers_once(1, _equal_natives, feature)
    assert outcome.ok, outcome.traceback


def _attention_of_transformer_engine_equals_native() -> None:
    class TEDotProductAttention(torch.nn.Module, ABC):
        def forward(self) -> None:
            pass

    pose_transformer_engine(TEDotProductAttention)
    te_attention = importlib.import_module("ditron_train.megatron.sp.te_attention")
    assert te_attention.DitronTEDotProductAttention == TEDotProductAttention  # as LLaVAModel asks
    assert te_attention.class_map() == {TEDotProductAttention: te_attention.DitronTEDotProductAttention}


def test_the_attention_of_transformer_engine_equals_its_native() -> None:
    (outcome,) = run_workers_once(1, _attention_of_transformer_engine_equals_native)
    assert outcome.ok, outcome.traceback


@pytest.mark.parametrize("name", ["tp/te_layers.py", "ep/te_experts.py", "sp/te_attention.py"])
def test_so_do_those_beside_transformer_engine(name: str) -> None:
    """By their source: without Transformer Engine these classes cannot be imported."""
    tree = ast.parse((_PACKAGE / name).read_text(encoding="utf-8"))
    (mapped,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "class_map")
    (pairs,) = (node for node in ast.walk(mapped) if isinstance(node, ast.Dict))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for native, fused in zip(map(ast.unparse, filter(None, pairs.keys)), map(ast.unparse, pairs.values)):
        if fused in classes:  # others are in the map that was asked above
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in classes[fused].keywords}
            assert keywords == {"metaclass": "EqualsBaseClass", "native": native}, fused


def _build_latent_attention() -> str:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from ditron_train.cpu.megatron_shim import CPU_CONFIG
    from ditron_train.megatron import apply
    from tests.support.model_parallel import model_parallel

    spec = apply(get_gpt_layer_local_spec(multi_latent_attention=True), features="tp")
    spec.submodules.self_attention.submodules.core_attention = IdentityOp  # Megatron's own takes no other head sizes
    multi_latent_attention.TELinear = torch.nn.Bilinear  # without Transformer Engine it is no class
    with model_parallel(tensor_model_parallel_size=1):
        sizes = dict(num_layers=1, hidden_size=16, num_attention_heads=2, q_lora_rank=8, kv_lora_rank=8)
        heads = dict(qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=8)
        config = MLATransformerConfig(**sizes, **heads, **{**CPU_CONFIG, "multi_latent_attention": True})
        groups = ProcessGroupCollection.use_mpu_process_groups()
        attention = build_module(spec.submodules.self_attention, config=config, layer_number=1, pg_collection=groups)
    return type(attention.linear_kv_down_proj).__qualname__


def test_latent_attention_takes_our_down_projections_from_a_spec() -> None:
    """Megatron knows how to build three classes there, and raised an error for the fused path."""
    (outcome,) = run_workers_once(1, _build_latent_attention)
    assert outcome.ok, outcome.traceback
    assert outcome.value == "DitronColumnParallelLinear"
