"""Many small experts: all products of a rank's experts as one kernel each, bit for bit as expert by expert, and what
is left for the host to do in a forward and a backward."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
from small_experts_workers import host_work, small_experts_agree, trials_agree  # noqa: E402

from ditron_train.ep.plan import PAIRS  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402

FORCED = {"env": {"DITRON_POLICY": "force"}}
EIGHT = {"num_moe_experts": 8, "moe_router_topk": 2}
ONE_OF_MANY = {"num_moe_experts": 16, "moe_router_topk": 1, "moe_router_pre_softmax": True}


@pytest.mark.parametrize(
    ("options", "tokens", "routing", "dtype", "into_main_grad"),
    [
        (EIGHT, (24, 17), "random", torch.bfloat16, False),
        (EIGHT, (24, 17), "random", torch.float32, True),
        (EIGHT, (9, 0), "one rank", torch.bfloat16, True),
        (ONE_OF_MANY, (12, 12), "the same experts", torch.float32, False),
        (EIGHT, (7, 0, 12, 3), "random", torch.bfloat16, True),
    ],
    ids=["random", "main_grad", "no tokens on a rank, nor rows on one", "one expert has all", "four ranks"],
)
def test_one_kernel_has_the_bits_of_a_product_for_each_expert(options, tokens, routing, dtype, into_main_grad):
    everything = (PAIRS, options, tokens, routing, dtype, into_main_grad)
    for launched in run_workers(len(tokens), small_experts_agree, *everything, **FORCED):
        assert not any(name.startswith("native") for name in launched), launched
        if routing == "random":
            # Of two steps: fc1's product and both of gradients of rows, both of weights, fc2's with its combine.
            kernels = [launched[f"{name}_kernel"] for name in ("group_gemm", "group_wgrad", "gemm_combine")]
            assert kernels == [6, 4, 2], launched


def test_products_without_a_movement():
    everything = (set(PAIRS) - {"gemm_combine", "overlap_wgrad"}, EIGHT, (24, 17), "random", torch.bfloat16)
    for launched in run_workers(2, small_experts_agree, *everything, **FORCED):
        kernels = [launched.get(f"{name}_kernel", 0) for name in ("group_gemm", "group_wgrad", "gemm_combine")]
        assert kernels == [8, 4, 0] and not any(name.startswith("native") for name in launched), launched


@pytest.mark.parametrize("most_rows, native", [(1000, 0), (9, 4)])
def test_an_expert_with_more_rows_than_were_compared(most_rows, native):
    """The weight gradients of such a step, two a step, are those of one product for each expert, on all ranks."""
    everything = (PAIRS, EIGHT, (24, 17), "random", torch.bfloat16, False, {"group_wgrad": most_rows})
    for launched in run_workers(2, small_experts_agree, *everything, **FORCED):
        assert launched.get("native NT", 0) == native and launched.get("native NN", 0) == 0, launched


def test_experts_of_few_rows_are_multiplied_natively_in_each_product():
    """Of fewer than 8 rows, which are less than a quarter of all: of the others the kernels' results stay."""
    limits = dict.fromkeys(("gemm_combine", "fc1_gemm", "fc2_dgrad", "fc1_dgrad"), 8)
    everything = (PAIRS, EIGHT, (24, 17), "random", torch.bfloat16, False, limits)
    seen = Counter()
    for launched in run_workers(2, small_experts_agree, *everything, **FORCED):
        seen.update(launched)
    assert seen["native TN"] == seen["native NN"] > 0, seen


#: Of a forward and a backward with ``main_grad``, on rank 0: they may fall, not rise.
MOST = {"op": (52, 35), "launch": (9, 7), "sync": (1, 0), "native product": (0, 0), "collective": (0, 0)}


def _totals(seen):
    totals = Counter()
    for (kind, _, _), count in seen.items():
        totals[kind] += count
    return totals


def test_what_the_host_does_in_a_step_of_128_experts():
    (_, native), (forward, backward) = run_workers(2, host_work, PAIRS, True, **FORCED)[0]
    for place, seen in enumerate((forward, backward)):
        totals = _totals(seen)
        found = {kind: totals[kind] for kind in MOST}
        assert found == {kind: most[place] for kind, most in MOST.items()}, (found, seen)
    # Nothing is asked for once for each of a rank's 64 experts, as natively.
    assert max(max(forward.values()), max(backward.values())) < 64 <= max(native.values())


def test_without_main_grad_autograd_alone_does_something_for_each_expert():
    _, (forward, backward) = run_workers(2, host_work, PAIRS, False, **FORCED)[0]
    many = {name for (_, name, _), count in backward.items() if count >= 64}
    assert many == {"aten.detach.default"} and max(forward.values()) < 64, many


@pytest.mark.parametrize("into_main_grad", [False, True])
def test_what_the_policy_compares(into_main_grad):
    for chosen in run_workers(2, trials_agree, into_main_grad):
        assert chosen == set(PAIRS) - {"fc2_gemm"}, "fc2's GEMM is one kernel with its combine"
