"""How a GEMM-A2A or A2A-GEMM runs at a shape: its tile and how many programs move data, by a tuning table, else by
rule.

Every rank reads the same table, so all choose alike without communication. Neither choice changes bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ditron_train.data.tuning_table import active_table, class_of_size, shape_class, tuned_count
from ditron_train.gemm.configs import (
    GemmConfig,
    as_count,
    choose_config,
    config_entry,
    config_of_entry,
    config_variants,
)
from ditron_train.runtime.device import device_name
from ditron_train.runtime.errors import SettingError
from ditron_train.sp.context import SPContext
from ditron_train.sp.transfer_sizes import EXCHANGE_PROGRAMS, NUM_PUSH, PULL_GROUP_M, receive_programs

ProjectionOp = Literal["gemm_a2a", "a2a_gemm"]


@dataclass(frozen=True)
class Product:
    """C [m, n] = A [m, k] @ B of one rank, whose weight is stored as ``layout`` says."""

    op: ProjectionOp
    layout: str
    m: int
    n: int
    k: int
    dtype: torch.dtype

    @property
    def table_op(self) -> str:
        """What tuning tables call it."""
        return f"{self.op} {self.layout}"

    @property
    def shape_class(self) -> str:
        """See ``data.tuning_table``."""
        return shape_class(self.m, self.n, self.k)


@dataclass(frozen=True)
class ProjectionChoice:
    """The tile of the GEMM; ``programs``: those that pull what it computes, or push before they multiply."""

    config: GemmConfig
    programs: int


def default_choice(product: Product, context: SPContext) -> ProjectionChoice:
    """What runs without a table.

    Raises:
        NotSupportedError: No GEMM for this type or device.
    """
    m, n, k, dtype = product.m, product.n, product.k, product.dtype
    config = choose_config(m, n, k, dtype, context.target, context.num_sms)
    if product.op == "a2a_gemm":
        return ProjectionChoice(config, NUM_PUSH)
    return ProjectionChoice(replace(config, group_m=PULL_GROUP_M), receive_programs(m, n, k, dtype.itemsize))


def choose(product: Product, context: SPContext) -> ProjectionChoice:
    """The choice of a shape: a table's if its class was measured, else the default.

    Raises:
        SettingError: The table cannot be read, or its entry.
        NotSupportedError: No GEMM for this type or device.
    """
    default = default_choice(product, context)
    table = active_table(device_name(context.device))
    entry = table.find(product.table_op, context.world_size, product.shape_class) if table is not None else None
    if entry is None:
        return default
    try:
        return ProjectionChoice(config_of_entry(entry), min(as_count(entry["programs"]), context.num_sms // 2))
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        where = f"{context.world_size} ranks, {product.table_op}, {product.shape_class}"
        raise SettingError(f"the tuning table's entry of {where} cannot be read: {error!r}") from None


def exchange_class(m: int, num_columns: int) -> str:
    """The class of an exchange without a GEMM: rows of one rank, and columns of all heads."""
    return f"{class_of_size(m)}x{class_of_size(num_columns)}"


def exchange_programs(op: str, m: int, num_columns: int, context: SPContext) -> int:
    """Programs of a ``to_heads`` or ``to_sequence`` that push, and as many that take apart what arrives.

    Raises:
        SettingError: The table cannot be read, or its entry.
    """
    name = exchange_class(m, num_columns)
    found = tuned_count(device_name(context.device), op, context.world_size, name, "programs")
    return EXCHANGE_PROGRAMS if found is None else min(found, max(context.num_sms // 2, 1))


def transfers(base: ProjectionChoice, context: SPContext) -> list[ProjectionChoice]:
    """Other numbers of programs that move data; on the CPU there is one."""
    counts = (4, 8, 12, 16, 24) if context.is_cuda else ()
    return [replace(base, programs=count) for count in counts if count != base.programs]


def tiles(base: ProjectionChoice, context: SPContext) -> list[ProjectionChoice]:
    """Other tiles."""
    return [replace(base, config=config) for config in config_variants(base.config, context.target)]


def choice_entry(choice: ProjectionChoice) -> dict[str, Any]:
    """``choice`` as a table holds it."""
    return {**config_entry(choice.config), "programs": choice.programs}
