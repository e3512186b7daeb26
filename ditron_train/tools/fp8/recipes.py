"""FP8 recipes by the names of Megatron's ``--fp8-recipe``: what command lines take, what rows call them, what is
refused before anything is launched."""

from __future__ import annotations

import argparse
import importlib
from contextlib import AbstractContextManager
from typing import Any

from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.versions import pip_command
from ditron_train.tools.cases import Shape
from ditron_train.tp.choices import Op

#: Recipes by Megatron's name, and the names of Transformer Engine's classes.
RECIPES = {"tensorwise": "Float8CurrentScaling", "delayed": "DelayedScaling", "blockwise": "Float8BlockScaling"}
#: Of a rank's tokens and of features, by recipe: what cuBLAS multiplies, and blocks of scales.
_ALIGNMENT = {"tensorwise": 16, "delayed": 16, "blockwise": 128}


def add_fp8_argument(parser: argparse._ActionsContainer, text: str) -> None:
    """Adds ``--fp8 RECIPE``; ``text`` is what it does."""
    parser.add_argument("--fp8", choices=tuple(RECIPES), metavar="RECIPE", help=f"{text}: {', '.join(RECIPES)}")


def check_fp8(recipe: str | None, what: str) -> None:
    """Refuses a recipe if nothing could be compared with it.

    Raises:
        NotSupportedError: Transformer Engine is not installed, or cannot be loaded.
    """
    if recipe is None:
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be loaded ({error})"
        raise NotSupportedError(
            f"{what} --fp8 {recipe} compares with Transformer Engine, which {reason}: "
            f"{pip_command('transformer-engine')}"
        ) from None


def fp8_format(recipe: str) -> str:
    """``--fp8-format`` as published recipes have it: gradients in E5M2, with blocks in E4M3."""
    return "e4m3" if recipe == "blockwise" else "hybrid"


def fp8_options(recipe: str | None) -> dict[str, str]:
    """Keywords of Megatron's ``TransformerConfig``; none without a recipe."""
    return {} if recipe is None else {"fp8": fp8_format(recipe), "fp8_recipe": recipe}


def fp8_context(config: Any) -> AbstractContextManager[Any]:
    """What Megatron calls a layer of ``config`` in: nothing if it has no recipe."""
    from megatron.core.fp8_utils import get_fp8_context

    context: AbstractContextManager[Any] = get_fp8_context(config, 0)
    return context


def unsupported_reason_native(recipe: str) -> str | None:
    """Why tensor parallel layers of a recipe run natively alone, or None."""
    from ditron_train.megatron.tp.te_fp8 import unsupported_reason_recipe

    recipes = importlib.import_module("transformer_engine.common.recipe")
    return unsupported_reason_recipe(getattr(recipes, RECIPES[recipe])())


def unsupported_reason_aligned(op: Op, shape: Shape, world_size: int, recipe: str) -> str | None:
    """Why FP8 layers do not take these sizes, or None."""
    m, n, k = (shape.sizes[name] for name in "mnk")
    step = _ALIGNMENT[recipe]
    own_n, own_k = (n // world_size, k) if op == "ag_gemm" else (n, k // world_size)
    if m // world_size % step or own_n % step or own_k % step:
        return f"{op} {m}x{n}x{k} over {world_size} ranks: --fp8 {recipe} needs multiples of {step} on each"
    return None
