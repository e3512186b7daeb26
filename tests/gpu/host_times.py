"""The host's time to enqueue a layer of each subpackage, by Megatron's module and by fused, us of a call.

    python scripts/launch.py 2 tests/gpu/host_times.py [--package tp ...] [--most-seconds 40] [--output FILE]
        [--profiles FILE]

Two ranks may share one GPU: times of the device mean nothing then, those of the host do. The device is idle when a
batch of calls begins, and no call waits for it. Contenders come in the order native, fused, fused, native. ``busy`` is
the time that the calling thread was on a core: what it slept for the device is not in it. A room's cases that would
begin after its ``--most-seconds`` are named and left out: subpackages can run one by one, or side by side. Another
tree's package is measured where PYTHONPATH names it. On CPUs with TRITON_INTERPRET=1 only whether it runs is seen.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import io
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [os.environ.get("PYTHONPATH", str(ROOT)).split(":")[0] or str(ROOT)]
os.environ.setdefault("DITRON_POLICY", "force")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

ON_GPU = torch.cuda.is_available()
NUM_CALLS, FEW_CALLS = (8, 2) if ON_GPU else (1, 1)
LONG_BATCH_S = 0.4  # a batch of few calls that takes longer stays one: the device, or NCCL's sockets, hold it up
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")

#: Of one call: enqueues the forward and returns what enqueues its backward, or None.
Forward = Callable[[], Callable[[], object] | None]


def _synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def _all_agree(is_over: bool) -> bool:
    """Whether it is over on any rank; a barrier, too."""
    flag = torch.tensor([int(is_over)], device=DEVICE)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


class Batch:
    """Calls of one contender, the device idle in front of the forwards and in front of the backwards."""

    def __init__(self, forward: Forward) -> None:
        self._forward, self.num_calls = forward, FEW_CALLS
        self.times: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}

    def run(self, profiles: dict[str, cProfile.Profile] | None = None, *, keeps: bool = True) -> None:
        """``profiles``: collect instead of measuring; ``keeps``: whether the times count."""
        backwards = self._timed("forward", [self._forward] * self.num_calls, profiles, keeps)
        with torch.autograd.set_multithreading_enabled(False):  # else a thread of its own is on the core
            if None not in backwards:
                self._timed("backward", backwards, profiles, keeps)
        _synchronize()

    def _timed(self, name: str, calls: list[Any], profiles: dict[str, cProfile.Profile] | None, keeps: bool) -> list:
        _synchronize()
        _all_agree(False)
        began, busy = time.perf_counter(), time.thread_time()
        if profiles is not None:
            profiles[name].enable()
        results = [call() for call in calls]
        if profiles is not None:
            profiles[name].disable()
        elif keeps:
            ended = time.perf_counter(), time.thread_time()
            self.times[name].append(tuple(1e6 * (b - a) / self.num_calls for a, b in zip((began, busy), ended)))
        return results


def _values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(1000 * seed + dist.get_rank())
    return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(generator=generator)


def _layer(call: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> Forward:
    x, grads = _values(*shape).requires_grad_(), []

    def forward() -> Callable[[], object]:
        y = call(x)
        if not grads:
            grads.append(_values(*y.shape, seed=1))
        return lambda: y.backward(grads[0])

    return forward


@contextlib.contextmanager
def _groups(**sizes: int) -> Iterator[None]:
    from ditron_train.cpu import megatron_shim

    if not ON_GPU:
        megatron_shim.install()
    else:
        megatron_shim.allow_torch_norm_with_sequence_parallel()
    with megatron_shim.parallel_groups(**sizes):
        yield


def _config(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    settings = dict(
        num_layers=2, hidden_size=64, num_attention_heads=4, add_bias_linear=False, params_dtype=DTYPE,
        pipeline_dtype=DTYPE, bf16=ON_GPU, gradient_accumulation_fusion=False, normalization="RMSNorm",
        attention_dropout=0.0, hidden_dropout=0.0, masked_softmax_fusion=False, use_cpu_initialization=not ON_GPU,
    )  # fmt: skip
    return TransformerConfig(**{**settings, **options})


def _linears(
    classes: tuple[type, type], tokens: int, hidden: int, ffn: int, sequence_parallel: bool, recipe: str | None = None
) -> Forward:
    from ditron_train.tools.fp8.recipes import fp8_context, fp8_options

    world = dist.get_world_size()
    sizes = dict(hidden_size=hidden, tensor_model_parallel_size=world, sequence_parallel=sequence_parallel)
    config = _config(**sizes, **fp8_options(recipe))
    options = dict(config=config, init_method=torch.nn.init.normal_, bias=False, skip_bias_add=False, is_expert=False)
    column = classes[0](hidden, ffn, gather_output=False, **options)
    row = classes[1](ffn, hidden, input_is_parallel=True, **options)
    shape = (tokens // world if sequence_parallel else tokens, 1, hidden)

    def call(x: torch.Tensor) -> torch.Tensor:
        with fp8_context(config):
            return row(column(x)[0])[0]

    return _layer(call, shape)


def _tp_cases() -> Iterator[tuple[str, dict[str, Forward]]]:
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from ditron_train.megatron.tp import layers

    kinds: dict[str, list[tuple[type, type]]] = {
        "local": [
            (ColumnParallelLinear, RowParallelLinear),
            (layers.DitronColumnParallelLinear, layers.DitronRowParallelLinear),
        ]
    }
    if HAVE_TE:
        from ditron_train.megatron.tp import te_layers as te

        kinds["te"] = [
            (te.TELayerNormColumnParallelLinear, te.TERowParallelLinear),
            (te.DitronTELayerNormColumnParallelLinear, te.DitronTERowParallelLinear),
        ]
    sizes = {"small": (2048, 1024, 2048), "large": (8192, 4096, 14336)} if ON_GPU else {"small": (32, 64, 128)}
    with _groups(tensor_model_parallel_size=dist.get_world_size()):
        for size, shape in sizes.items():
            for kind, pair in kinds.items():
                yield (
                    f"tp {kind} column+row {size}",
                    {name: _linears(classes, *shape, True) for name, classes in zip(("native", "fused"), pair)},
                )
        for recipe in ("tensorwise", "delayed", "blockwise") if ON_GPU and HAVE_TE else ():
            made = (_linears(classes, *sizes["large"], True, recipe) for classes in kinds["te"])
            yield f"tp te column+row large, FP8 {recipe}", dict(zip(("native", "fused"), made))
        yield (
            "tp local column+row small, no sequence parallelism",
            {name: _linears(one, *sizes["small"], False) for name, one in zip(("native", "fused"), kinds["local"])},
        )


def _sp_cases() -> Iterator[tuple[str, dict[str, Forward]]]:
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.spec_utils import build_module

    import ditron_train.megatron as plugin
    from ditron_train.cpu import megatron_shim

    if not HAVE_TE:  # Megatron's own attention knows no all-to-all
        return
    world, length = dist.get_world_size(), 4096
    with _groups(context_parallel_size=world):
        for what, options in (("", {}), (", q/k norms", {"qk_layernorm": True})):
            config = _config(
                hidden_size=2048, num_attention_heads=16, num_query_groups=8, kv_channels=128, cp_comm_type="a2a",
                context_parallel_size=world, **options,
            )  # fmt: skip
            spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=bool(options))
            made = {}
            for name in ("native", "fused"):
                tree = spec.submodules.self_attention
                tree = tree if name == "native" else plugin.apply(tree, "sp", policy=os.environ["DITRON_POLICY"])
                megatron_shim.seed(5)
                built = build_module(tree, config=config, layer_number=1, cp_comm_type="a2a").cuda().to(DTYPE)
                made[name] = _layer(lambda x, one=built: one(x, attention_mask=None)[0], (length // world, 1, 2048))
            yield f"sp attention layer{what}", made
            plugin.restore()


def _ep_cases() -> Iterator[tuple[str, dict[str, Forward]]]:
    from ditron_train.tools.bench.megatron_ep import expert_parallel_world, layer_pair
    from ditron_train.tools.cases.ep_moves import moe_config

    sizes = dict(hidden=1024, ffn_hidden=512, num_experts=16, topk=4) if ON_GPU else dict(
        hidden=32, ffn_hidden=48, num_experts=4, topk=2
    )  # fmt: skip
    tokens = 1024 if ON_GPU else 24
    padded = dict(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    many = dict(hidden=2048, ffn_hidden=768, num_experts=128, topk=8) if ON_GPU else {}  # of Qwen3-30B-A3B
    with expert_parallel_world():
        # Natively the host waits for the counts of tokens; with padding to a capacity nobody waits.
        for what, options in (("", {}), (", padded to capacity", padded), (", 128 experts", many)):
            every = {**sizes, **options}
            shape = (8 * tokens if options is many else tokens, 1, every["hidden"])
            layers = layer_pair(moe_config(**every, dtype=DTYPE), DEVICE)
            yield (
                f"ep MoE layer{what}",
                {
                    name: _layer(lambda x, one=one: one(x)[0], shape)
                    for name, one in zip(("native", "fused"), layers.values())
                },
            )


def _pp_cases() -> Iterator[tuple[str, dict[str, Forward]]]:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from ditron_train.megatron.pp.communicator import DitronP2PCommunicator

    world = dist.get_world_size()
    shape = (2048, 1, 1024) if ON_GPU else (8, 1, 64)
    with _groups(pipeline_model_parallel_size=world):
        # Without the device sync behind each batch, which native has by default and the fused path never.
        config = _config(pipeline_model_parallel_size=world, batch_p2p_comm=True, batch_p2p_sync=False)
        group = parallel_state.get_pipeline_model_parallel_group()
        is_first, tensor, made = dist.get_rank() == 0, _values(*shape), {}
        for name, kind in (("native", P2PCommunicator), ("fused", DitronP2PCommunicator)):
            one = kind(group, config)
            send = one.send_forward_recv_backward if is_first else one.send_backward_recv_forward

            def forward(send: Any = send) -> None:
                send(tensor, shape, not is_first) if is_first else send(tensor, shape, is_first)

            made[name] = forward
        yield "pp send and receive", made


def _muon_cases() -> Iterator[tuple[str, dict[str, Forward]]]:
    from ditron_train.tools.cases import RunEnvironment
    from ditron_train.tools.cases.muon import MUON_STEP, step_shape

    layer = ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)) if ON_GPU else ((48, 64), (64, 64))
    world: Any = dist.group.WORLD
    call = MUON_STEP.sample(step_shape("custom", layer, 4), RunEnvironment(world, DEVICE, torch.float32), 0)
    op = MUON_STEP.op
    paths = {"native": op.native(call), "fused": op.fused(call, op.make_context(call))}

    def forward(path: Any) -> None:
        path(*call.gradients)

    yield "muon step of 16 matrices", {name: lambda path=path: forward(path) for name, path in paths.items()}


PACKAGES = {"tp": _tp_cases, "sp": _sp_cases, "ep": _ep_cases, "pp": _pp_cases, "muon": _muon_cases}


def _profile_text(profile: cProfile.Profile, num_calls: int, most: int = 40) -> str:
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text)
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:most]  # type: ignore[attr-defined]
    total = sum(row[2] for row in stats.stats.values())  # type: ignore[attr-defined]
    lines = [f"  {1e6 * total / num_calls:.0f} us of a call under the profile"]
    for (file, line, name), (_, calls, own, cumulative, _) in rows:
        place = f"{Path(file).parent.name}/{Path(file).name}:{line} " if line else ""
        own_us, all_us = 1e6 * own / num_calls, 1e6 * cumulative / num_calls
        lines.append(f"  {calls / num_calls:6.1f} calls {own_us:7.1f} us own {all_us:7.1f} us all  {place}{name}")
    return "\n".join(lines)


def _warm_up(batches: dict[str, Batch]) -> None:
    """Prepares and records: a sequence is recorded at its third call. Then says how many calls a batch has."""
    began = time.monotonic()
    for last in (False, False, True) if ON_GPU else (True,):
        began = time.monotonic() if last else began
        for batch in batches.values():
            batch.run(keeps=False)
    is_long = _all_agree(time.monotonic() - began > LONG_BATCH_S * len(batches))
    for batch in batches.values():
        batch.num_calls = FEW_CALLS if is_long else NUM_CALLS


def measure(name: str, contenders: dict[str, Forward], seconds: float, until: float) -> tuple[dict[str, Any], str]:
    """The row of one case and the profiles of its contenders; past ``until`` one pass is enough."""
    batches = {who: Batch(forward) for who, forward in contenders.items()}
    _warm_up(batches)
    began, order, passed = time.monotonic(), [*batches.values()], 0

    def is_over() -> bool:
        now = time.monotonic()
        return passed > 0 and (now > until or not ON_GPU or passed >= 3 and now - began > seconds)

    while not _all_agree(is_over()):
        for batch in (*order, *reversed(order)):
            batch.run()
        passed += 1
    row: dict[str, Any] = {"case": name, "rounds": 2 * passed, "calls": order[0].num_calls}
    texts = []
    for who, batch in batches.items():
        profiles = {direction: cProfile.Profile() for direction in batch.times}
        batch.run(profiles)
        for direction, times in batch.times.items():
            if times:
                walls, busy = zip(*times)
                row[f"{who} {direction}"] = statistics.median(walls)
                row[f"{who} {direction} busy"] = statistics.median(busy)
                texts.append(f"{name}: {who} {direction}\n{_profile_text(profiles[direction], batch.num_calls)}")
    return row, "\n".join(texts)


def show(row: dict[str, Any]) -> str:
    """A line of the table for each direction."""
    lines = []
    for direction in ("forward", "backward"):
        if f"fused {direction}" in row:
            cells = [row[f"{who} {direction}{what}"] for what in ("", " busy") for who in ("native", "fused")]
            ratios = cells[1] / cells[0], cells[3] / cells[2]
            cells = [*cells[:2], ratios[0], *cells[2:], ratios[1]]
            words = [f"{cell:.2f}" if index % 3 == 2 else f"{cell:.0f}" for index, cell in enumerate(cells)]
            lines.append(f"| {row['case']} | {direction} | {' | '.join(words)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", action="append", choices=list(PACKAGES))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case, at least three passes")
    parser.add_argument(
        "--most-seconds", type=float, default=600.0, help="of each subpackage, until its last case begins"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--profiles", type=Path)
    arguments = parser.parse_args()
    backend = "gloo"
    if ON_GPU:
        import shared_gpus

        if shared_gpus.is_needed():
            shared_gpus.set_up()
        backend = shared_gpus.backend()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        global DEVICE
        DEVICE = torch.device("cuda", torch.cuda.current_device())
        _sleep_for_the_device(DEVICE.index)
    else:
        from ditron_train.cpu import interpreter

        interpreter.install()
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    is_first, rows = dist.get_rank() == 0, []
    if is_first:
        print(
            "| case | pass | native, us | fused, us | ratio | native busy | fused busy | ratio |\n"
            + "| --- " * 8
            + "|"
        )
    for package in arguments.package or PACKAGES:
        until = time.monotonic() + arguments.most_seconds
        try:
            for name, contenders in PACKAGES[package]():
                if _all_agree(time.monotonic() > until):
                    if is_first:
                        print(f"left out after {arguments.most_seconds:.0f} s: {name}", flush=True)
                    continue
                row, profiles = measure(name, contenders, arguments.seconds, until)
                rows.append(row)
                if is_first:
                    print(show(row), flush=True)
                    if arguments.output is not None:
                        arguments.output.write_text(json.dumps(rows, indent=1))
                    if arguments.profiles is not None:
                        with arguments.profiles.open("a") as file:
                            file.write(profiles + "\n")
        except (RuntimeError, TypeError, ValueError, AttributeError, ImportError, AssertionError) as error:
            print(f"rank {dist.get_rank()}: {package}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    _synchronize()
    dist.barrier()
    os._exit(0)  # forty groups of NCCL are not torn down one by one


def _sleep_for_the_device(index: int) -> None:
    """A host that waits for the device sleeps, so that ``busy`` is what the calls take."""
    from cuda.bindings import driver

    driver.cuInit(0)
    blocking = driver.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC
    driver.cuDevicePrimaryCtxSetFlags(driver.cuDeviceGet(index)[1], blocking)


if __name__ == "__main__":
    main()
