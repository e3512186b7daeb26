"""What workers do for `test_activation`."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from unittest import mock

import torch.distributed as dist

from tests.reach import models


class Lines(logging.Handler):
    """Collects the package's log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("ditron_train").addHandler(self)
        logging.getLogger("ditron_train").setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *exc_info: object) -> None:
        logging.getLogger("ditron_train").removeHandler(self)


def losses_of_an_unedited_program(by_grid: bool) -> tuple[bool, list[float], list[str]]:
    """The program knows nothing of this package; ``arm`` is what ``sitecustomize`` has called before it."""
    from ditron_train.hook import arm
    from tests.support.model_parallel import model_parallel

    arm()
    groups = models.grid() if by_grid else model_parallel(tensor_model_parallel_size=dist.get_world_size())
    with Lines() as lines, groups as collection:
        model = models.gpt(collection)
        losses = [models.log_probs(model, 16), models.train(model, 16), models.train(model, 20)]
    return models.is_fused(model), losses, lines


def error_of_an_unedited_program(ditron_of_rank: list[str | None], by_grid: bool = False) -> str:
    """With another ``DITRON`` on each rank."""
    from ditron_train.hook import arm
    from tests.support.model_parallel import destroy_groups, model_parallel

    mine = ditron_of_rank[dist.get_rank()]
    with mock.patch.dict(os.environ, {} if mine is None else {"DITRON": mine}):
        arm()
        try:
            groups = models.grid() if by_grid else model_parallel(tensor_model_parallel_size=dist.get_world_size())
            with groups as collection:
                models.gpt(collection)
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            destroy_groups()
    return ""


def without_arguments() -> dict[str, object]:
    """``apply_args`` and init hooks in a Ray actor, whose command line is Ray's; versions outside the range."""
    import megatron.core

    import ditron_train.megatron as ditron
    from ditron_train.runtime.errors import VersionError
    from ditron_train.runtime.logs import forget_decisions

    found: dict[str, object] = {}

    def seen(name: str, call, *args, **kwargs) -> None:
        forget_decisions()
        with Lines() as lines:
            try:
                call(*args, **kwargs)
            except VersionError:
                lines.append("VersionError")
            found[name] = (ditron.active_features(), list(lines))
        ditron.restore()

    nameless = Namespace(tensor_model_parallel_size=2)
    with mock.patch("sys.argv", ["default_worker.py", "--node-ip-address=1.2.3.4"]):
        seen("apply_args", ditron.apply_args, nameless)
        seen("named", ditron.apply_args, Namespace(ditron=("tp",), tensor_model_parallel_size=2))
        seen("nobody named", ditron.apply_args, Namespace(ditron=()))
        seen("enable", ditron.enable, nameless, model="x")
        with mock.patch.dict(os.environ, {"DITRON": "tp,ep"}):
            seen("apply_args by the environment", ditron.apply_args, nameless)
            seen("apply as an init hook", ditron.apply, nameless)
            seen("enable by the environment", ditron.enable, nameless, model="x")
            seen("the arguments count more", ditron.apply_args, Namespace(ditron=("tp",)))
        for version in ("0.15.0rc3", "0.16.0rc0", "0.16.0", "0.20.0"):
            with mock.patch.object(megatron.core, "__version__", version):
                seen(f"{version} by apply", ditron.apply, features="tp")
                with mock.patch.dict(os.environ, {"DITRON": "tp"}):
                    seen(f"{version} by DITRON", ditron.enable)
    return found


def losses_around_children() -> tuple[list[float], list[int | None]]:
    """Children that are forked and spawned once features are on, as data loaders and writers of checkpoints are."""
    import multiprocessing

    from ditron_train.hook import arm
    from tests.support.model_parallel import model_parallel

    arm()
    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        model = models.gpt()
        losses, codes = [models.train(model, 16)], []
        for way in ("fork", "spawn"):
            child = multiprocessing.get_context(way).Process(target=_child)
            child.start()
            child.join(300)
            codes.append(child.exitcode)
        losses.append(models.train(model, 16))
    return losses, codes


def _child() -> None:
    import megatron.core  # noqa: F401
    import torch

    assert torch.ones(3).sum() == 3
