"""Which of Megatron-LM's unit tests are run, and how their parallel sizes are made to fit fewer ranks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_TRANSFORMER = (
    "attention", "attention_no_rope", "attention_packed_seq", "core_attention", "mlp", "multi_token_prediction",
    "spec_customization", "submodule_callables", "transformer_block", "transformer_layer",
)  # fmt: skip

#: Folders and files below ``tests/unit_tests``, by name, those that take longest first. The tests of a suite share a
#: process; the largest folders are several suites.
FOLDERS: dict[str, tuple[str, ...]] = {
    "dist_checkpointing_layer_wise": ("dist_checkpointing/test_layer_wise_optimizer.py",),
    "dist_checkpointing_experts": ("dist_checkpointing/models/test_moe_experts.py",),
    "a2a_overlap": ("a2a_overlap",),
    "pipeline_parallel": ("pipeline_parallel",),
    "transformer_mla": ("transformer/test_multi_latent_attention.py",),
    "transformer_pgs": ("transformer/test_transformer_block_custom_pgs.py",),
    "moe_a": ("transformer/moe/test_a*.py",),
    "moe_m": ("transformer/moe/test_m*.py",),
    "moe_to_l": ("transformer/moe/test_[b-l]*.py",),
    "moe_from_n": ("transformer/moe/test_[n-z]*.py",),
    "transformer": tuple(f"transformer/test_{name}.py" for name in _TRANSFORMER),
    "gpt": ("models/test_gpt_model.py", "models/test_gpt_model_batch_invariant.py"),
    "dist_checkpointing_gpt": ("dist_checkpointing/models/test_gpt_model.py",),
    "distributed": ("distributed",),
    "optimizer": ("test_muon_optimizer.py", "test_layer_wise_optimizer.py", "test_optimizer.py", "optimizer"),
    "tensor_parallel": ("tensor_parallel",),
    "determinism": ("determinism",),  # of newer Megatron-LM; see CONTRIBUTING
}
#: Into how many suites the tests of a folder or file are dealt out, since a process would take minutes for them.
_PARTS = {"dist_checkpointing_layer_wise": 6, "dist_checkpointing_experts": 3, "a2a_overlap": 2, "moe_a": 2}


class Part(NamedTuple):
    """Part ``index`` of ``count`` of the tests of ``paths``."""

    paths: tuple[str, ...]
    index: int = 0
    count: int = 1


def _dealt_out(name: str) -> dict[str, Part]:
    count = _PARTS.get(name, 1)
    names = [name] if count == 1 else [f"{name}_{number}" for number in range(1, count + 1)]
    return {one: Part(FOLDERS[name], index, count) for index, one in enumerate(names)}


SUITES: dict[str, Part] = {one: part for name in FOLDERS for one, part in _dealt_out(name).items()}


def paths_of(checkout: Path, suite: str) -> list[str]:
    """What to give pytest in ``checkout``: the suite's folders and files, as far as that version has them."""
    found = [path for part in SUITES[suite].paths for path in sorted(checkout.glob(f"tests/unit_tests/{part}"))]
    return [str(path.relative_to(checkout)) for path in found]


def suites_of(folder: str) -> list[str]:
    """The suites that ``--folder`` names: one, or all parts of it."""
    return [suite for suite in SUITES if suite == folder or suite.startswith(f"{folder}_")]


def fit_sizes(world_size: int, *sizes: int) -> tuple[int, ...]:
    """``sizes`` whose product is at most ``world_size``: the largest is halved until it is, of equal ones the last."""
    fitting = list(sizes)
    while _product(fitting) > world_size:
        largest = max(fitting)
        index = len(fitting) - 1 - fitting[::-1].index(largest)
        fitting[index] = largest // 2
    return tuple(fitting)


def fit_expert_sizes(world_size: int, pipeline: int, expert: int, expert_tensor: int) -> tuple[int, int]:
    """Expert parallel and expert tensor parallel sizes that fit beside ``pipeline`` stages, which stay."""
    sliced, whole = fit_sizes(max(1, world_size // pipeline), expert_tensor, expert)
    return whole, sliced


def fit_parallelism(world_size: int, sizes: dict[str, int]) -> None:
    """Makes the sizes of a cell of the determinism tests (``{"TP": 4, "EP": 2}``) fit, which skip what does not."""
    sharded = [name for name in ("EP", "FSDP") if name in sizes]
    whole = max((sizes[name] for name in sharded), default=1)
    tensor, pipeline, most = fit_sizes(world_size, sizes.get("TP", 1), sizes.get("PP", 1), whole)
    fitting = {"TP": tensor, "PP": pipeline, **{name: min(sizes[name], most) for name in sharded}}
    for name in list(sizes):
        sizes[name] = fitting.get(name, sizes[name])
    if pipeline == 1:
        sizes.pop("VPP", None)


def _product(sizes: list[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
