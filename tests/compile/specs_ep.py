"""Kernels of the ep room, as a group of 8 ranks with 128 experts launches them."""

from tests.support.compile_check import KernelSpec

_LAYOUT = {"EXPERTS_PER_RANK": 16, "WORLD_SIZE": 8, "RANKS": 8, "SLOTS": 16, "BLOCK_T": 16}
_INT = "*i32"


def _signature(*groups: tuple[str, str]) -> dict[str, str]:
    return {name: kind for names, kind in groups for name in names.split()}


_CHANNEL = ("signal_addresses ready_addresses", "*i64"), ("signals ready signature", _INT), ("tickets control", "*i64")

_PUSH = _signature(
    ("x out buffer", "*bf16"), ("out_probs", "*fp32"),
    ("kept origins dest_slots send_list chunk_entries list_base entry_base recv_offsets arrived", _INT),
    ("buffer_addresses entry_addresses", "*i64"), *_CHANNEL,
    ("limits", _INT), ("num_tokens chunk_tokens hidden", "i32"),
)  # fmt: skip
_RETURN = _signature(
    ("y out buffer", "*bf16"),
    ("row_grads prob_grads grad_buffer", "*fp32"),
    ("kept recv_offsets chunk_entries expert_ids token_places", _INT),
    ("buffer_addresses grad_addresses", "*i64"),
    *_CHANNEL,
    ("limits", _INT),
    ("num_tokens chunk_tokens hidden num_experts", "i32"),
)
_SUM = _signature(
    ("out buffer", "*bf16"),
    ("prob_grads grad_buffer", "*fp32"),
    ("chunk_entries expert_ids token_places signals", _INT),
    ("tickets control", "*i64"),
    ("num_tokens chunk_tokens hidden num_experts", "i32"),
)
_AHEAD = _signature(
    ("x", "*bf16"), ("dest_slots send_list chunk_entries list_base entry_base", _INT),
    ("buffer_addresses entry_addresses", "*i64"), *_CHANNEL, ("limits", _INT),
    ("num_tokens chunk_tokens hidden slot_room entry_room", "i32"),
)  # fmt: skip
del _AHEAD["signals"]
_PLACE = _signature(
    ("x out buffer", "*bf16"), ("out_probs", "*fp32"), ("kept origins recv_offsets arrived signals limits", _INT),
    ("control", "*i64"), ("num_tokens hidden", "i32"),
)  # fmt: skip
_MOVE = {"WORLD_SIZE": 8, "NUM_CHUNKS": 128, "BLOCK_H": 8192, "NUM_SENDERS": 16, "SHARED": False}
_UNALIGNED = ("num_tokens", "limits", "list_base", "entry_base", "recv_offsets", "slot_room", "entry_room")


def _aligned(signature: dict[str, str]) -> tuple[str, ...]:
    return tuple(name for name in signature if name not in _UNALIGNED)


SPECS = [
    KernelSpec(
        name="ep_count_chunks",
        kernel="ditron_train.ep.layout_kernels:count_chunks",
        signature=_signature(
            ("routing_map", "*u8"), ("chunk_counts chunk_dests chunk_widest", _INT), ("num_tokens chunk_tokens", "i32")
        ),
        constexprs=_LAYOUT,
        num_warps=4,
    ),
    KernelSpec(
        name="ep_exchange_counts",
        kernel="ditron_train.ep.layout_kernels:exchange_counts",
        signature=_signature(
            ("chunk_counts chunk_dests chunk_widest chunk_entries row_base slot_base entry_base list_base", _INT),
            ("recv_offsets expert_tokens sources limits messages", _INT),
            ("message_addresses dispatch_tickets", "*i64"),
            *_CHANNEL,
            ("num_tokens row_capacity slot_capacity place_capacity", "i32"),
        ),  # fmt: skip
        constexprs={
            "WORLD_SIZE": 8,
            "RANKS": 8,
            "SLOTS": 16,
            "NUM_CHUNKS": 128,
            "TOPK": 8,
            "MESSAGE_WORDS": 266,
            "HAS_CAPACITY": True,
        },  # fmt: skip
        num_warps=8,
        aligned=("chunk_counts", "messages"),
        signals=True,
    ),
    *(
        KernelSpec(
            name=f"ep_list_entries_{name}",
            kernel="ditron_train.ep.layout_kernels:list_entries",
            signature=_signature(
                ("routing_map", "*u8"),
                ("probs", "*fp32"),
                (
                    "chunk_counts chunk_dests chunk_entries row_base slot_base list_base send_list dest_slots "
                    "expert_ids",
                    _INT,
                ),
                ("token_places", _INT),
                ("num_tokens chunk_tokens num_places rank", "i32"),
            ),  # fmt: skip
            constexprs={**_LAYOUT, "RAGGED": ragged, "TOPK": 8, "NUM_CHUNKS": 128, "TOPK_LANES": 8},
            num_warps=4,
        )
        for name, ragged in (("topk", False), ("padded", True))
    ),
    *(
        KernelSpec(
            name=f"ep_push_tokens_{name}",
            kernel="ditron_train.ep.kernels:push_tokens",
            signature=_PUSH,
            constexprs={**_MOVE, "ROWS": 2, "RANKS": 8, "WITH_ENTRIES": with_entries, "ZERO_PROBS": with_entries},
            num_warps=16,
            aligned=_aligned(_PUSH),
            signals=True,
        )
        for name, with_entries in (("first", True), ("again", False))
    ),
    KernelSpec(
        name="ep_push_ahead",
        kernel="ditron_train.ep.kernels:push_ahead",
        signature=_AHEAD,
        constexprs={"WORLD_SIZE": 8, "RANKS": 8, "NUM_CHUNKS": 128, "ROWS": 2, "BLOCK_H": 8192, "NUM_SENDERS": 16},
        num_warps=16,
        aligned=_aligned(_AHEAD),
        signals=True,
    ),
    KernelSpec(
        name="ep_place_arrived",
        kernel="ditron_train.ep.kernels:place_arrived",
        signature=_PLACE,
        constexprs={"ZERO_PROBS": True, "WORLD_SIZE": 8, "NUM_CHUNKS": 128, "ROWS": 2, "BLOCK_H": 8192},
        num_warps=16,
        aligned=_aligned(_PLACE),
        signals=None,
    ),
    *(
        KernelSpec(
            name=f"ep_return_rows_{name}",
            kernel="ditron_train.ep.return_kernels:return_rows",
            signature=_RETURN,
            constexprs={
                **_MOVE,
                "ROWS": 4,
                "WITH_GRADS": with_grads,
                "RAGGED": ragged,
                "TOPK": 8,
                "TOPK_LANES": 8,
                "ROUND_EACH": round_each,
                "DESCENDING": not round_each,
                "SUM_ROWS": 1,
                "ITEM_TOKENS": 8,
            },  # fmt: skip
            num_warps=16,
            aligned=_aligned(_RETURN),
            signals=True,
        )
        for name, with_grads, round_each, ragged in (
            ("index_add", False, True, False),
            ("fused_with_grads", True, False, False),
            ("padded_with_grads", True, True, True),
        )
    ),
    KernelSpec(
        name="ep_sum_returned",
        kernel="ditron_train.ep.return_kernels:sum_returned",
        signature=_SUM,
        constexprs={
            "WORLD_SIZE": 8,
            "NUM_CHUNKS": 128,
            "BLOCK_H": 8192,
            "WITH_GRADS": True,
            "RAGGED": False,
            "TOPK": 8,
            "TOPK_LANES": 8,
            "ROUND_EACH": False,
            "DESCENDING": True,
            "SUM_ROWS": 1,
            "ITEM_TOKENS": 8,
        },  # fmt: skip
        num_warps=16,
        aligned=_aligned(_SUM),
        signals=None,
    ),
]
