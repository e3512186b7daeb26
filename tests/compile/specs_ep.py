"""Kernels of the ep subpackage that lay out and move, as a group of 8 ranks with 128 experts launches them."""

from tests.support.compile_check import KernelSpec

_INT = "*i32"
_LAYOUT = {
    "WORLD_SIZE": 8,
    "RANKS": 8,
    "EXPERTS_PER_RANK": 16,
    "SLOTS": 16,
    "TOPK": 8,
    "TOPK_LANES": 8,
    "NUM_CHUNKS": 128,
    "COLUMNS": 128,
    "COMMON_WORDS": 138,
    "MESSAGE_WORDS": 266,
    "TARGET": None,
}


def fields(*groups: tuple[str, str]) -> dict[str, str]:
    """Types of the fields of a tuple, or of the arguments of a kernel, in their order."""
    return {name: kind for names, kind in groups for name in names.split()}


def move_sizes(rows: int, with_entries: bool) -> dict[str, object]:
    """``MoveSizes`` of tokens of 8192 elements."""
    return {
        "WITH_ENTRIES": with_entries,
        "ZERO_PROBS": with_entries,
        "WORLD_SIZE": 8,
        "RANKS": 8,
        "NUM_CHUNKS": 128,
        "ROWS": rows,
        "BLOCK_H": 8192,
        "TARGET": None,
        "NUM_SENDERS": 16,
        "SHARED": False,
    }


def sum_sizes(
    with_grads: bool, round_each: bool, ragged: bool, tile_count: int = 1, by_rank: bool = False
) -> dict[str, object]:
    """``SumSizes`` of rows of 8192 elements."""
    return {
        "WITH_GRADS": with_grads,
        "RAGGED": ragged,
        "TOPK": 8,
        "TOPK_LANES": 8,
        "ROUND_EACH": round_each,
        "DESCENDING": not round_each,
        "WORLD_SIZE": 8,
        "NUM_CHUNKS": 128,
        "ROWS": 4,
        "SUM_ROWS": 1,
        "BLOCK_H": 8192,
        "ITEM_TOKENS": 8,
        "TARGET": None,
        "NUM_SENDERS": 99 if by_rank else 16,
        "SHARED": False,
        "TILE_COUNT": tile_count,
        "BY_RANK": by_rank,
        "EXPERTS_PER_RANK": 16 if by_rank else 1,
    }


CHANNEL = fields(
    ("signals", _INT),
    ("signals_addresses", "*i64"),
    ("ready", _INT),
    ("ready_addresses", "*i64"),
    ("signature", _INT),
    ("tickets control", "*i64"),
)
TO = fields(("dest_slots send_list chunk_entries list_base entry_base", _INT))
PLACED = fields(("rows", "*bf16"), ("probs", "*fp32"), ("entries origins", _INT))
TOKEN_BUFFERS = fields(
    ("tokens", "*bf16"), ("token_addresses", "*i64"), ("entries", _INT), ("entry_addresses", "*i64")
)
ROW_BUFFERS = fields(("rows", "*bf16"), ("row_addresses", "*i64"), ("grads", "*fp32"), ("grad_addresses", "*i64"))
SUMS = fields(("out", "*bf16"), ("prob_grads", "*fp32"), ("chunk_entries expert_ids token_places", _INT))
_TABLES = fields(
    ("chunk_counts chunk_dests chunk_widest chunk_entries row_base slot_base entry_base list_base", _INT),
    ("recv_offsets expert_tokens sources limits", _INT),
)
_STARTS = fields(("chunk_counts chunk_dests chunk_entries row_base slot_base list_base", _INT))

SPECS = [
    KernelSpec(
        name="ep_count_chunks",
        kernel="ditron_train.ep.layout:count_chunks",
        signature=fields(
            ("routing_map", "*u8"), ("chunk_counts chunk_dests chunk_widest", _INT), ("num_tokens chunk_tokens", "i32")
        ),
        constexprs={"S": _LAYOUT, "BLOCK_T": 16},
        num_warps=4,
    ),
    KernelSpec(
        name="ep_exchange_counts",
        kernel="ditron_train.ep.layout:exchange_counts",
        signature={
            "tables": _TABLES,
            **fields(("messages", _INT), ("message_addresses", "*i64")),
            "channel": CHANNEL,
            **fields(
                ("dispatch_tickets", "*i64"),
                ("num_tokens row_capacity slot_capacity place_capacity most_experts", "i32"),
            ),
        },
        constexprs={"S": _LAYOUT, "HAS_CAPACITY": True},
        num_warps=8,
        signals=True,
    ),
    *(
        KernelSpec(
            name=f"ep_list_entries_{name}",
            kernel="ditron_train.ep.layout:list_entries",
            signature={
                **fields(("routing_map", "*u8"), ("probs", "*fp32")),
                "starts": _STARTS,
                **fields(("token_places send_list dest_slots expert_ids", _INT)),
                **fields(("num_tokens chunk_tokens num_places rank", "i32")),
            },
            constexprs={"S": _LAYOUT, "RAGGED": ragged, "BLOCK_T": 16},
            num_warps=4,
        )
        for name, ragged in (("topk", False), ("padded", True))
    ),
    *(
        KernelSpec(
            name=f"ep_push_tokens_{name}",
            kernel="ditron_train.ep.dispatch:push_tokens",
            signature={
                "x": "*bf16",
                "placed": PLACED,
                "to": TO,
                "recv_offsets": _INT,
                "buffers": TOKEN_BUFFERS,
                "channel": CHANNEL,
                **fields(("limits", _INT), ("num_tokens chunk_tokens hidden", "i32")),
            },
            constexprs={"MOVE": move_sizes(2, with_entries)},
            num_warps=16,
            signals=True,
        )
        for name, with_entries in (("first", True), ("again", False))
    ),
    KernelSpec(
        name="ep_push_ahead",
        kernel="ditron_train.ep.dispatch:push_ahead",
        signature={
            "x": "*bf16",
            "to": TO,
            "buffers": TOKEN_BUFFERS,
            "channel": CHANNEL,
            **fields(("limits", _INT), ("num_tokens chunk_tokens hidden slot_room entry_room", "i32")),
        },
        constexprs={"MOVE": move_sizes(2, True)},
        num_warps=16,
        signals=True,
    ),
    KernelSpec(
        name="ep_place_arrived",
        kernel="ditron_train.ep.dispatch:place_arrived",
        signature={
            "x": "*bf16",
            "placed": PLACED,
            "inbox": fields(
                ("recv_offsets", _INT), ("tokens", "*bf16"), ("entries signals", _INT), ("control", "*i64")
            ),
            **fields(("limits", _INT), ("num_tokens hidden", "i32")),
        },
        constexprs={"MOVE": move_sizes(2, True)},
        num_warps=16,
        signals=None,
    ),
    *(
        KernelSpec(
            name=f"ep_return_rows_{name}",
            kernel="ditron_train.ep.combine:return_rows",
            signature={
                "sent": fields(("rows", "*bf16"), ("grads", "*fp32"), ("entries recv_offsets", _INT)),
                "sums": SUMS,
                "buffers": ROW_BUFFERS,
                "channel": CHANNEL,
                **fields(("limits", _INT), ("num_tokens chunk_tokens hidden num_experts", "i32")),
            },
            constexprs={"SUM": sum_sizes(with_grads, round_each, ragged, by_rank=by_rank)},
            num_warps=16,
            signals=True,
        )
        for name, with_grads, round_each, ragged, by_rank in (
            ("index_add", False, True, False, False),
            ("fused_with_grads", True, False, False, False),
            ("padded_with_grads", True, True, True, False),
            ("by_rank", False, False, False, True),
            ("by_rank_with_grads", True, False, False, True),
        )
    ),
    KernelSpec(
        name="ep_sum_returned",
        kernel="ditron_train.ep.combine:sum_returned",
        signature={
            "sums": SUMS,
            "inbox": fields(("rows", "*bf16"), ("grads", "*fp32"), ("signals", _INT), ("control", "*i64")),
            **fields(("tickets", "*i64"), ("num_tokens chunk_tokens hidden num_experts", "i32")),
        },
        constexprs={"SUM": sum_sizes(True, False, False)},
        num_warps=16,
        signals=None,
    ),
]
