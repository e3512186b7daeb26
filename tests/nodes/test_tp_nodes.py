"""Tensor parallel linear layers over simulated nodes: bits of megatron-core's, gathers and sums by rails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import bodies_memory  # noqa: E402
import bodies_nodes as bodies  # noqa: E402

from tests.support.nodes import run_on_nodes  # noqa: E402


@pytest.mark.parametrize(
    ("nodes", "ranks", "batch", "dtype"),
    [(2, 2, 3, torch.float32), (2, 1, 0, torch.bfloat16), (4, 2, 1, torch.bfloat16)],
)
def test_linear_layers(nodes, ranks, batch, dtype):
    # A node begins the sums of all owners but its last: gloo's ring descends, to the first rank of a node.
    wanted = [nodes - (rank % 2 == 0) if rank % 2 < ranks else None for rank in range(2 * nodes)]
    assert run_on_nodes(nodes, 2, bodies.tp_linears, ranks, batch, dtype) == wanted


GATHER, SUMS = "_parts", "gemm_rs_over_nodes"
BY_RAILS = "descending sums"
NO_GATHER, NO_SUMS = "instead of native gather", "instead of native sums"


@pytest.mark.parametrize(
    ("kind", "slower", "ways", "tried"),
    [
        ("column", [], ([GATHER], [GATHER, SUMS]), [f"{BY_RAILS}, forward", f"{BY_RAILS} {NO_SUMS}", BY_RAILS]),
        ("column", [".*forward"], ([], [SUMS]), [f"{BY_RAILS}, forward", f"{BY_RAILS}, native gather"]),
        (
            "column",
            [f".*{NO_SUMS}"],
            ([GATHER], [GATHER]),
            [f"{BY_RAILS}, forward", f"{BY_RAILS} {NO_SUMS}", "native sums"],
        ),
        ("column", [BY_RAILS], None, [f"{BY_RAILS}, forward", f"{BY_RAILS} {NO_SUMS}", BY_RAILS]),
        ("column", [f"{BY_RAILS}.*"], None, [f"{BY_RAILS}, forward", f"{BY_RAILS}, native gather"]),
        ("row", [], ([SUMS], [GATHER, SUMS]), [f"{BY_RAILS}, forward", f"{BY_RAILS} {NO_GATHER}", BY_RAILS]),
        ("row", [".*forward"], ([], [GATHER]), [f"{BY_RAILS}, forward", "native sums"]),
        (
            "row",
            [f".*{NO_GATHER}"],
            ([SUMS], [SUMS]),
            [f"{BY_RAILS}, forward", f"{BY_RAILS} {NO_GATHER}", f"{BY_RAILS}, native gather"],
        ),
        ("row", [BY_RAILS], None, [f"{BY_RAILS}, forward", f"{BY_RAILS} {NO_GATHER}", BY_RAILS]),
        ("row", [f"{BY_RAILS}.*", "native sums"], None, [f"{BY_RAILS}, forward", "native sums"]),
    ],
)
def test_what_is_not_faster_by_rails_is_left_to_the_process_group(kind, slower, ways, tried):
    assert run_on_nodes(2, 2, bodies.tp_trials, kind, slower) == [(ways, tried)] * 4


@pytest.mark.parametrize(
    "layout, frozen, by_rails",
    [
        ("whole", True, 1),
        ("sequences", True, 0),  # stock Megatron multiplies sequence by sequence there
        ("columns", True, 0),
        ("whole", False, 1),
        ("sequences", False, 1),  # it copies them
        ("columns", False, 0),
    ],
)
def test_gradients_with_strides_are_multiplied_whole(layout, frozen, by_rails):
    assert run_on_nodes(2, 1, bodies.tp_strides, layout, frozen) == [by_rails] * 2


def test_each_answer_keeps_its_own_way():
    assert run_on_nodes(2, 2, bodies.tp_answers) == [[True, False, True]] * 4


CASES = st.tuples(
    st.sampled_from([1, 2]),  # ranks of each node
    st.sampled_from([1, -1]),  # NCCL's ring ascends, gloo's descends
    st.integers(1, 5),
    st.sampled_from([8, 16, 40]),
    st.integers(1, 24),
    st.sampled_from(["nt", "nn"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 1 << 20),
)


@pytest.mark.parametrize(("nodes", "num_examples"), [(2, 6), (4, 4)])
def test_sums_follow_rings_both_ways(nodes, num_examples):
    @settings(max_examples=num_examples, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(st.lists(CASES, min_size=6, max_size=6))
    def follows(cases):
        for rank, found in enumerate(run_on_nodes(nodes, 2, bodies.sums_along_rings, cases)):
            steps = [step if nodes * ranks > 2 else 1 for ranks, step, *_ in cases]  # two ranks have one order
            assert found == [step if rank % 2 < case[0] else None for step, case in zip(steps, cases)]

    follows()


NODES = {"first_node": (0, 1), "last_node": (2, 3)}


@pytest.mark.parametrize("capped", NODES.values(), ids=NODES)
@pytest.mark.parametrize("lacking", ["context", "forward", "backward"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_memory_that_one_node_lacks_leaves_every_node_native(kind, lacking, capped):
    step = {"context": "making a context on every node", "forward": "making room on every node"}
    words = step.get(lacking, step["forward"])
    found = run_on_nodes(2, 2, bodies_memory.linear_of_a_node_without_memory, kind, lacking, capped)
    (reason,) = {reason for reason, _ in found}
    assert reason.startswith(f"{words} failed on 2 of 4 ranks: rank {capped[0]}: ArenaError: symmetric buffer")
    assert "DITRON_ARENA_BYTES" in reason
    assert [logged for _, logged in found] == [[f"tp {kind}: native, {reason}"]] * 4


@pytest.mark.parametrize("capped", NODES.values(), ids=NODES)
@pytest.mark.parametrize("given_back", [False, True], ids=["above_the_cap", "given_back"])
def test_memory_that_one_node_lacks_is_an_error_of_every_rank_without_a_layer(given_back, capped):
    first, *others = run_on_nodes(2, 2, bodies_memory.ops_of_a_node_without_memory, capped, given_back)
    assert len(first) == 4 and others == [first] * 3
    assert all(error.startswith("making room on every node failed on 2 of 4 ranks") for error in first)
