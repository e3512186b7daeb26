"""Tools with ``--fp8`` in workers, with the stand-in for Transformer Engine of ``tests/native``."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
import types

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "native"))
import te_fp8_workers  # noqa: E402


@contextlib.contextmanager
def stand_in(covered: bool = True, wrong_bit: bool = False):
    """Layers of the stand-in in the place of Megatron's; ``wrong_bit``: the fused ones differ in one bit on the last
    rank."""
    native_class, fused_class = te_fp8_workers._classes()
    operands = sys.modules["transformer_engine.pytorch.tensor.float8_tensor"]
    operands.Float8Tensor = operands.Storage  # which rows of experts are, here walked through alone
    from ditron_train.megatron.tp.te_fp8 import overlapping
    from ditron_train.policy import Answer
    from ditron_train.tools.cases import tp_fp8
    from ditron_train.tp import get_tp_context

    def make(kind, n, k, world_size, recipe):
        shape = (n // world_size, k) if kind == "column" else (n, k // world_size)

        class Native(native_class):
            def forward(self, x):
                return super().forward(x), None

        class Fused(fused_class):
            def forward(self, x):
                with overlapping(kind, get_tp_context(dist.group.WORLD, torch.device("cpu"))):
                    y = super().forward(x)
                if wrong_bit and dist.get_rank() == world_size - 1:
                    y = y + torch.nn.functional.one_hot(torch.tensor(0), y.shape[-1]).to(y.dtype)
                return y, None

        made = [one(torch.zeros(shape).bfloat16(), kind, dist.group.WORLD, recipe) for one in (Native, Fused)]
        for layer in made:
            layer.quantizers = {"scaling_fwd": [layer.inputs, layer.weights], "scaling_bwd": [layer.grads]}
        return types.SimpleNamespace(fp8=None), *made

    def route(self, call):
        return Answer(get_tp_context(dist.group.WORLD, torch.device("cpu"))) if covered else "not covered here"

    # Whole numbers, which quantising leaves as they are.
    tp_fp8.math = types.SimpleNamespace(sqrt=lambda k: 1)
    tp_fp8._layers, tp_fp8.LayerOp.route = make, route
    tp_fp8.unsupported_reason_native = lambda recipe: None if covered else "not covered here"
    yield


def _parsed(tool, *words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    tool.add_arguments(parser)
    return parser.parse_args(list(words))


def run_bench(folder, covered):
    """``bench tp`` in bf16's place first, then in FP8: the exit statuses."""
    with stand_in(covered):
        from ditron_train.tools.bench import tp

        often = ("--repetitions", "1", "--warmup", "0", "--output", folder, "--shape", "64", "64", "64")
        plain = tp.run(_parsed(tp, *often, "--part", "ag_gemm"))
        parts = ("--part", "ag_gemm", "--part", "gemm_rs", "--part", "backward")
        from ditron_train.tools.nothing_compared import NothingComparedError

        try:
            return plain, tp.run(_parsed(tp, *often, *parts, "--fp8", "tensorwise"))
        except NothingComparedError:
            return plain, 2


def run_verify(folder, wrong_bit):
    """``verify --fp8`` of two layers, and the room ``tp``."""
    with stand_in(wrong_bit=wrong_bit):
        from ditron_train.tools.verify import verifier

        words = ("--fp8", "tensorwise", "--column", "64", "64", "64", "--row", "64", "64", "64", "--repeat", "2")
        often = ("--repetitions", "1", "--warmup", "0", "--output", folder)
        return verifier.run(_parsed(verifier, *words, *often))


def run_trace(folder):
    """``trace --op column_linear --fp8``."""
    with stand_in():
        from ditron_train.tools.trace.record import record_op

        return record_op("column_linear", (64, 64, 64), pathlib.Path(folder), "tensorwise")


def refused(*words):
    """What a tool says with the stand-in."""
    with stand_in():
        from ditron_train.runtime.errors import DitronError
        from ditron_train.tools.trace.record import record_op
        from ditron_train.tools.verify import verifier

        try:
            if words[0] == "trace":
                return record_op(words[1], None, pathlib.Path(words[2]), "tensorwise")
            return verifier.run(_parsed(verifier, "--fp8", "tensorwise", *words[1:]))
        except DitronError as error:
            return str(error)
