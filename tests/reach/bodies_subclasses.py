"""What workers do for `test_subclasses`."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.distributed as dist

from tests.reach.bodies_activation import Lines


def layers() -> dict[str, object]:
    """Subclasses as frameworks write them: what is built, what it gives, and what the log says."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer

    import ditron_train.megatron as ditron
    from ditron_train.cpu.megatron_shim import CPU_CONFIG, seed
    from ditron_train.megatron.ep.layer import DitronMoELayer
    from ditron_train.megatron.plugin.subclasses import fused_subclass, replaced_methods
    from ditron_train.megatron.tp.layers import DitronColumnParallelLinear
    from tests.support.model_parallel import model_parallel

    class Plain(ColumnParallelLinear):
        pass

    class ScaledHead(ColumnParallelLinear):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.scale = 0.5

        def forward(self, *args, **kwargs):
            out, bias = super().forward(*args, **kwargs)
            return out * self.scale, bias

    class TwiceScaled(ScaledHead):
        def forward(self, *args, **kwargs):
            out, bias = super().forward(*args, **kwargs)
            return out * 2, bias

        def extra_repr(self):
            return "twice"

    class Mixin:
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Mixed(Mixin, ColumnParallelLinear):
        def describe(self):
            return "new methods are its own"

    class OwnForward(ColumnParallelLinear):
        def forward(self, input_, weight=None, runtime_gather_output=None):
            return ColumnParallelLinear.forward(self, input_, weight, runtime_gather_output)

    class OwnStep(RowParallelLinear):
        """The fused path overrides ``forward`` and would not call this."""

        def _forward_impl(self, *args, **kwargs):
            return super()._forward_impl(*args, **kwargs) * 3

    class OwnMoE(MoELayer):
        def forward(self, hidden_states):
            return hidden_states

    found: dict[str, object] = {}
    world_size = dist.get_world_size()
    with model_parallel(tensor_model_parallel_size=world_size):
        config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, sequence_parallel=True,
                                   tensor_model_parallel_size=world_size, **CPU_CONFIG)  # fmt: skip
        x = torch.randint(-3, 4, (4, 1, 16)).float()

        def outcome(cls):
            seed(3)
            options = dict(config=config, bias=False, skip_bias_add=False)
            options |= dict(input_is_parallel=True) if cls is OwnStep else dict(gather_output=False)
            layer = cls(16, 16, init_method=lambda w: w.copy_(torch.randint(-2, 3, w.shape).float()), **options)
            inputs = x[..., :8] if cls is OwnStep else x
            if cls is OwnStep:
                inputs = torch.cat([inputs] * world_size)
            inputs = inputs.clone().requires_grad_()
            out, _ = layer(inputs)
            out.square().sum().backward()
            return layer, (out.detach(), inputs.grad, layer.weight.grad)

        classes = (Plain, ScaledHead, TwiceScaled, Mixed, OwnForward, OwnStep)
        native = {cls.__name__: outcome(cls)[1] for cls in classes}
        ditron.apply(features="tp,ep")

        class Later(ColumnParallelLinear):
            pass

        with Lines() as lines:
            for cls in (*classes, Later):
                layer, values = outcome(cls)
                is_fused = type(layer) is not cls
                expected = native.get(cls.__name__, values)
                assert isinstance(layer, cls) and type(layer).__name__ == cls.__name__
                assert type(layer) in (cls,), "Megatron compares by =="
                assert all(map(torch.equal, values, expected)), cls
                if is_fused:
                    assert isinstance(layer, DitronColumnParallelLinear)
                    assert type(copy.copy(layer)) is type(layer)
                    assert pickle.loads(pickle.dumps(type(layer))) is type(layer)
                    assert type(outcome(cls)[0]) is type(layer), "made once"
                found[cls.__name__] = is_fused
            found["OwnMoE"] = fused_subclass(OwnMoE, MoELayer, DitronMoELayer) is not OwnMoE
        found["lines"] = lines
        found["replaced"] = replaced_methods(OwnMoE, MoELayer, DitronMoELayer)
        ditron.restore()
        found["restored"] = type(outcome(ScaledHead)[0]) is ScaledHead
    return found
