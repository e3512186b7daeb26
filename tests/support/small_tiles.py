"""Sizes of the kernels that move tokens between experts, for the few short rows of tests.

Tiles of a release have 8192 elements and more. The interpreter computes all of them, though rows of some ten elements
fill a hundredth, and one tile would hold whatever a chunk has.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

#: Elements of tiles: some rows of 16 to 64 elements, fewer than large chunks have.
_TILES = {"push_elements": 512, "return_elements": 512, "sum_elements": 256}


def install() -> None:
    """In this process, and in its forks: of contexts that are made from now on."""
    from ditron_train.ep import context

    vars(context)["MoveConfig"] = functools.partial(context.MoveConfig, **_TILES)
    vars(context)["FusedConfig"] = functools.partial(context.FusedConfig, place_elements=512)


@contextlib.contextmanager
def tiles_of_a_release() -> Iterator[None]:
    """Contexts that are made meanwhile have a release's tiles, where `install` was called."""
    from ditron_train.ep import context

    configs: Any = (context.MoveConfig, context.FusedConfig)
    moves, fused = (getattr(config, "func", config) for config in configs)
    with mock.patch.multiple(context, MoveConfig=moves, FusedConfig=fused):
        yield


@contextlib.contextmanager
def two_chunks() -> Iterator[None]:
    """A rank's tokens are cut into two chunks at most, in contexts that are made meanwhile: the interpreter's four,
    which tests of the kernels have, are twice the work, and of no account to the layers around them."""
    from ditron_train.ep import context

    native = context.LayoutShape

    def shape(*sizes: int, **chunks: int) -> Any:
        return native(*sizes, **{**chunks, "num_chunks": 2} if chunks else {})  # of GPUs, as they are

    with mock.patch.object(context, "LayoutShape", shape):
        yield
