"""The kernel of embeddings, as deterministic mode launches it."""

from ditron_train.embedding.lookup import _AHEAD, _BLOCK, _NUM_WARPS
from tests.support.compile_check import KernelSpec

SPECS = [
    KernelSpec(
        name=f"sum_tokens_{dtype}",
        kernel="ditron_train.embedding.lookup:sum_tokens_kernel",
        signature={
            "gradient": f"*{dtype}",
            "words": "*i32",
            **dict.fromkeys(("ends", "tokens"), "*i64"),
            "sums": f"*{dtype}",
            **dict.fromkeys(("num_words", "features"), "i32"),
        },
        constexprs={"BLOCK": _BLOCK, "AHEAD": _AHEAD},
        num_warps=_NUM_WARPS,
        signals=False,
    )
    for dtype in ("bf16", "fp32")
]
