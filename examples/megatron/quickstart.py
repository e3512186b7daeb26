"""Trains a byte-level GPT with megatron-core twice, natively and with ditron_train, and compares every step.

    torchrun --standalone --nproc-per-node 2 examples/megatron/quickstart.py [--data FILE]

Both runs are in bf16. Every loss, every gradient and every gradient norm has to be bitwise identical, else the exit
status is 1, as it is if no fused call ran.

With GPUs: Megatron's deterministic settings. The native run is repeated first, and gradients that it does not repeat
itself are named and left out. Without a GPU: gloo and Triton's interpreter, with exact arithmetic on both paths
(``ditron_train/cpu/exact_arithmetic.py``), since torch and the interpreter would add products in different orders.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

# Read by CUDA, cuBLAS, NCCL and Transformer Engine when they start: Megatron's settings for deterministic training.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NCCL_ALGO", "Ring")
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402


def _arguments() -> argparse.Namespace:
    from ditron_train.megatron import add_ditron_args
    from ditron_train.tools.fp8.recipes import add_fp8_argument

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", metavar="FILE", help="text to train on (default: sources and documentation of this Python)"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("quickstart_results"), help="where loss.png goes"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--tp", type=int, help="tensor parallel size (default: what the other sizes leave)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument(
        "--sp", type=int, default=1, help="context parallel size, heads exchanged for tokens (Ulysses)"
    )
    parser.add_argument("--experts", type=int, help="experts of every MLP (default: a dense model)")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel size")
    parser.add_argument("--layers", type=int, help="transformer layers")
    parser.add_argument("--hidden", type=int, help="width of the model")
    parser.add_argument("--sequence", type=int, help="bytes of a sample")
    parser.add_argument("--batch", type=int, help="samples of a step on each data-parallel rank")
    parser.add_argument(
        "--spec", choices=("auto", "local", "te"), default="auto", help="layers: megatron-core's or TE's"
    )
    parser.add_argument(
        "--optimizer", choices=("adam", "muon", "dist_muon"), default="adam", help="Megatron's optimizer"
    )
    parser.add_argument("--distributed-optimizer", action="store_true", help="Adam sharded over data-parallel ranks; "
                        "gradients reduced and parameters gathered beside the layers")  # fmt: skip
    add_fp8_argument(parser, "GPUs with Transformer Engine: train in this recipe")
    add_ditron_args(parser)
    arguments = parser.parse_args()
    for name in ("steps", "tp", "pp", "sp", "experts", "ep", "layers", "hidden", "sequence", "batch"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name} has to be above 0")
    if arguments.ep > 1 and not arguments.experts:
        parser.error("--ep needs --experts")
    if arguments.ditron_record is not None or arguments.ditron_record_trace is not None:
        parser.error("--ditron-record is for a training of your own: here both paths are compared at once")
    if arguments.distributed_optimizer and arguments.optimizer != "adam":
        parser.error("--distributed-optimizer is Adam's; dist_muon shards by itself")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)  # now: not after two trainings
    except OSError as error:
        raise SystemExit(f"error: cannot write into {arguments.out}: {error.strerror}") from None
    return arguments


def _start(optimizer: str) -> bool:
    """Joins the job; returns whether it runs on GPUs."""
    on_gpu = torch.cuda.is_available()
    if optimizer == "dist_muon" and not on_gpu:
        raise SystemExit("error: --optimizer dist_muon needs GPUs: natively it gathers unevenly, which gloo cannot")
    if optimizer != "adam":
        from ditron_train.cpu import emerging_optimizers

        emerging_optimizers.install()  # native Muon needs it; if it is missing, the published equations stand in
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.use_deterministic_algorithms(True)
        # Filling fresh buffers would race with streams that communicate into them.
        torch.utils.deterministic.fill_uninitialized_memory = False
        dist.init_process_group("nccl", timeout=timedelta(minutes=5))
    else:
        from ditron_train.cpu import exact_arithmetic, interpreter
        from ditron_train.cpu import megatron_shim as megatron_cpu

        interpreter.install()
        megatron_cpu.install()
        exact_arithmetic.install()
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    return on_gpu


def _make_job(arguments: argparse.Namespace, on_gpu: bool):
    from byte_gpt import Job
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if arguments.spec == "te" and not (HAVE_TE and on_gpu):
        raise SystemExit("error: --spec te needs Transformer Engine and GPUs")
    if arguments.fp8 and not (HAVE_TE and on_gpu and arguments.spec != "local"):
        raise SystemExit(f"error: --fp8 {arguments.fp8} needs GPUs and Transformer Engine's layers (--spec te)")
    small = {"layers": 2, "hidden": 128, "sequence": 128, "batch": 2, "steps": 50}
    large = {"layers": 4, "hidden": 4096, "sequence": 4096, "batch": 2, "steps": 30}
    size = {name: getattr(arguments, name) or value for name, value in (large if on_gpu else small).items()}
    head_size = 128 if on_gpu else 32
    world_size, others = dist.get_world_size(), arguments.pp * arguments.sp
    tensor_parallel = arguments.tp or max(1, world_size // (others * arguments.ep))
    if world_size % (tensor_parallel * others) or (world_size // arguments.pp) % arguments.ep:
        raise SystemExit(
            f"error: {world_size} processes do not divide into TP {tensor_parallel} x PP {arguments.pp} x SP "
            f"{arguments.sp} with EP {arguments.ep}"
        )
    job = Job(
        num_layers=size["layers"],
        hidden_size=size["hidden"],
        ffn_hidden_size=size["hidden"] * (7 if on_gpu else 4) // 2,
        num_heads=max(1, size["hidden"] // head_size),
        sequence_length=size["sequence"],
        batch_size=size["batch"],
        num_steps=size["steps"],
        learning_rate=1e-4 if on_gpu else 2e-3,
        warmup_steps=10
        if on_gpu
        else 0,  # Adam's first steps move every weight alike, which a wide model does not bear
        dtype=torch.bfloat16,
        use_te=HAVE_TE and on_gpu and arguments.spec != "local",
        optimizer=arguments.optimizer,
        distributed_optimizer=arguments.distributed_optimizer,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=arguments.pp,
        context_parallel=arguments.sp,
        expert_parallel=arguments.ep,
        num_experts=arguments.experts,
        fp8=arguments.fp8,
    )
    for words, whole, part in (
        (f"{job.hidden_size} features into heads of {head_size}", job.hidden_size, min(head_size, job.hidden_size)),
        (f"{job.num_heads} heads over TP x SP", job.num_heads, job.tensor_parallel * job.context_parallel),
        (f"{job.num_layers} layers into {job.pipeline_parallel} stages", job.num_layers, job.pipeline_parallel),
        (f"{job.sequence_length} bytes over TP x SP", job.sequence_length, job.tensor_parallel * job.context_parallel),
        (f"{job.num_experts} experts over EP", job.num_experts or job.expert_parallel, job.expert_parallel),
    ):
        if whole % part:
            raise SystemExit(f"error: {words} do not divide")
    return job


def _features(job) -> tuple[str, ...]:
    """What the job divides over several ranks, if the command line names no features."""
    used = {
        "tp": job.tensor_parallel > 1,
        "sp": job.context_parallel > 1,
        "ep": job.expert_parallel > 1,
        "pp": job.pipeline_parallel > 1,
        "muon": job.optimizer != "adam",
    }
    return tuple(name for name, is_used in used.items() if is_used) or ("tp",)


def _native_job(job, console: Console):
    """The job whose native run is the reference: the same one wherever megatron-core itself can run it."""
    if job.context_parallel == 1 or job.use_te:
        return job
    console.print("native: megatron-core's own attention has no context parallelism; plain all-to-alls around it")
    return dataclasses.replace(job, plain_ulysses=True)


def _sizes(job) -> str:
    sizes = {
        "TP": job.tensor_parallel,
        "PP": job.pipeline_parallel,
        "SP": job.context_parallel,
        "EP": job.expert_parallel,
    }
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "TP")


def _run(job, corpus, label: str, console: Console):
    """One training run behind a progress bar."""
    from byte_gpt import train

    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("loss {task.fields[loss]:.4f}"))  # fmt: skip
    with Progress(*columns, console=console, disable=dist.get_rank() != 0) as progress:
        task = progress.add_task(label, total=job.num_steps, loss=float("nan"))
        return train(job, corpus, lambda result: progress.update(task, advance=1, loss=result.loss))


def _verdict(comparison, num_fused_calls: int, note: str, console: Console) -> int:
    """Prints what was found, the verdict last; returns the exit status, the same on every rank."""
    if comparison.unstable:
        console.print(f"native does not repeat these itself, left out: {', '.join(comparison.unstable)}")
    if comparison.different:
        step, name = comparison.different[0]
        console.print(
            f"error: {len(comparison.different)} losses, gradient norms or gradients differ from native; the first: "
            f"{name}, step {step + 1}",
            soft_wrap=True,
        )
    color = "green" if comparison.is_identical else "red"
    verdict = comparison.verdict(num_fused_calls, note)
    console.print(verdict, style=f"bold {color}", highlight=False, soft_wrap=True)
    return 0 if comparison.is_identical else 1


def _note(on_gpu: bool, times_ms: tuple[float, float]) -> str:
    """The end of the verdict: the speed on GPUs, given the times of a native and of a fused step; on a CPU the kind of
    arithmetic."""
    native_ms, fused_ms = times_ms
    if not on_gpu:
        return " (exact CPU arithmetic on both paths)"
    return f"; {native_ms / fused_ms:.2f}x ({native_ms:.1f} ms a step, fused {fused_ms:.1f} ms)"


def _counts_of_rank_0(counts: dict[str, int], features: Sequence[str]) -> dict[str, int]:
    """Fused calls of rank 0 by feature, on every rank. ``wgrad`` overlaps nothing and is not counted."""
    found = [{name: counts.get(name, 0) for name in features if name != "wgrad"}]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def main() -> int:
    """Runs the whole comparison; returns the exit status."""
    warnings.filterwarnings("ignore")  # megatron-core's, on what is not installed
    arguments = _arguments()
    if "RANK" not in os.environ:
        raise SystemExit("error: start it as bash scripts/quickstart.sh does, or by torchrun")
    on_gpu = _start(arguments.optimizer)
    from comparison import Comparison, median_time_ms, plot_losses, print_table, write_json
    from corpus import CorpusError, load_corpus

    import ditron_train.megatron as ditron
    from ditron_train.cpu import megatron_shim as megatron_cpu
    from ditron_train.megatron.plugin.fused_calls import FUSED_CALLS
    from ditron_train.tools.nothing_compared import NothingComparedError, require_compared

    console = Console(quiet=dist.get_rank() != 0)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("ditron_train").setLevel(logging.INFO)
    world_size = dist.get_world_size()
    job = _make_job(arguments, on_gpu)
    arguments.ditron = arguments.ditron or _features(job)
    try:
        corpus = load_corpus(arguments.data, job.sequence_length)
    except CorpusError as error:
        raise SystemExit(f"error: {error}") from None
    if on_gpu and not job.use_te:
        megatron_cpu.allow_torch_norm_with_sequence_parallel()
    where = torch.cuda.get_device_name() if on_gpu else "CPU, Triton interpreter"
    console.print(f"{world_size} x {where}, text of {corpus.num_bytes} bytes\n{job}")
    native_job = _native_job(job, console)
    native = _run(native_job, corpus, "native", console)
    again = _run(native_job, corpus, "native, once more", console) if on_gpu else None
    ditron.apply(features=arguments.ditron, transport=arguments.ditron_transport, timeout_s=arguments.ditron_timeout_s,
                 policy=arguments.ditron_policy, plan=arguments.ditron_plan)  # fmt: skip
    FUSED_CALLS.install(arguments.ditron)
    FUSED_CALLS.take()
    try:
        fused = _run(job, corpus, "fused " + ",".join(arguments.ditron), console)
    finally:
        ditron.restore()
    counts = _counts_of_rank_0(FUSED_CALLS.take(), arguments.ditron)

    comparison = Comparison(native, again, fused)
    times_ms = median_time_ms(again or native), median_time_ms(fused)
    print_table(console, native, fused, times_ms, "" if on_gpu else " (interpreted kernels: no word about a GPU's)")
    console.print("fused calls on rank 0: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    if dist.get_rank() == 0:
        summary = {"device": where, "world_size": world_size, "native_ms": times_ms[0], "ditron_ms": times_ms[1],
                   "bitwise_equal": comparison.is_identical, "different": comparison.different,
                   "fused_calls": counts, "not_repeated_by_native": comparison.unstable}  # fmt: skip
        write_json(arguments.out / "losses.json", summary, native, fused)
        plot_losses(arguments.out / "loss.png", native, fused, f"byte-level GPT, {_sizes(job)}, {where}")
        console.print(f"written: {arguments.out / 'loss.png'}, {arguments.out / 'losses.json'}")
    try:
        alone = "; most features need at least 2 ranks: use torchrun --nproc-per-node 2" if world_size == 1 else ""
        require_compared(counts, f"no fused call ran (the log says why each layer ran natively{alone})")
        status = _verdict(comparison, sum(counts.values()), _note(on_gpu, times_ms), console)
    except NothingComparedError as error:
        console.print(f"error: {error}", style="bold red", highlight=False, soft_wrap=True)
        status = 1
    dist.barrier()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    from ditron_train.runtime.errors import user_errors

    with user_errors():
        sys.exit(main())
