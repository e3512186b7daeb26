"""Rewriting of finished layer specs."""

import dataclasses
import functools

import pytest

from ditron_train.megatron.plugin.specs import rewrite_spec
from tests.support.megatron_version import module_of, submodules_of

pytest.importorskip("megatron.core")


class _Native:
    @classmethod
    def build(cls):
        return cls()


class _Other:
    pass


class _Fused(_Native):
    pass


@dataclasses.dataclass
class _Submodules:
    linear: object = None
    layers: list = None


def _classes_of_gpt_spec(spec):
    attention = spec.submodules.self_attention.submodules
    mlp = submodules_of(spec.submodules.mlp)
    return attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2


def test_gpt_spec_is_rewritten_and_the_original_is_left_alone():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    class Column(ColumnParallelLinear):
        pass

    class Row(RowParallelLinear):
        pass

    spec = get_gpt_layer_local_spec()
    classes = {ColumnParallelLinear: Column, RowParallelLinear: Row}
    rewritten, _ = rewrite_spec(spec, classes)
    assert _classes_of_gpt_spec(spec) == (ColumnParallelLinear, RowParallelLinear) * 2
    assert _classes_of_gpt_spec(rewritten) == (Column, Row) * 2
    assert rewrite_spec(spec, classes)[1] == 4
    assert rewrite_spec(rewritten, classes)[1] == 0
    assert type(rewritten) is type(spec)
    assert rewritten.module is spec.module
    assert rewritten.submodules.self_attention.params == spec.submodules.self_attention.params
    assert rewritten.submodules.sharded_state_dict_keys_map is spec.submodules.sharded_state_dict_keys_map


def test_moe_spec_experts_are_reached():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class Column(ColumnParallelLinear):
        pass

    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    rewritten, _ = rewrite_spec(spec, {ColumnParallelLinear: Column})
    experts = submodules_of(rewritten.submodules.mlp).experts
    assert submodules_of(experts).linear_fc1 is Column
    assert module_of(rewritten.submodules.mlp) is module_of(spec.submodules.mlp)


def test_modules_that_are_named_by_where_they_are_imported_from():
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    class Column(ColumnParallelLinear):
        pass

    names = ("megatron.core.tensor_parallel.layers", "ColumnParallelLinear")
    spec = ModuleSpec(module=names, params={"names": ("a", "b")})
    rewritten, _ = rewrite_spec(spec, {ColumnParallelLinear: Column})
    assert rewritten.module is Column and spec.module == names and rewritten.params == spec.params


def test_block_spec_layers_partials_tuples_and_params():
    classes = {_Native: _Fused}
    block = _Submodules(
        linear=functools.partial(_Native, 1, kind=_Native), layers=[_Native, (_Native, _Other), {"a": _Native}]
    )
    rewritten, _ = rewrite_spec(block, classes)
    assert rewritten.linear.func is _Fused
    assert rewritten.linear.args == (1,)
    assert rewritten.linear.keywords == {"kind": _Fused}
    assert rewritten.layers == [_Fused, (_Fused, _Other), {"a": _Fused}]
    assert block.layers == [_Native, (_Native, _Other), {"a": _Native}]
    assert rewrite_spec(block, classes)[1] == 5


def test_a_spec_without_replacements_is_returned_as_it_is():
    block = _Submodules(linear=_Other, layers=None)
    rewritten, number = rewrite_spec(block, {_Native: _Fused})
    assert rewritten is block and number == 0


def test_a_class_method_that_builds_is_fused():
    """As specs of newer versions name one: ``partial(MLP.as_mlp_submodule, submodules=...)``."""
    spec = functools.partial(_Native.build)
    rewritten, _ = rewrite_spec(spec, {_Native: _Fused})
    assert rewrite_spec(spec, {_Native: _Fused})[1] == 1
    assert isinstance(rewritten(), _Fused) and not isinstance(spec(), _Fused)
    assert rewrite_spec(functools.partial(_Native().build), {_Native: _Fused})[1] == 1
    assert rewrite_spec(functools.partial("".join), {_Native: _Fused})[1] == 0
