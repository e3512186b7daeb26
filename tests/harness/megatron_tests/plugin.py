"""The pytest plugin of every rank: Megatron as it is or with every feature, each test's outcome written down.

``MEGATRON_TESTS_JOB`` names a JSON file with the fields of `Job`. Without GPUs Megatron runs on the CPU, over gloo.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import importlib
import importlib.util
import json
import os
import sys
import threading
import time
import types
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ditron_train.megatron.plugin.fused_calls import FUSED_CALLS
from ditron_train.runtime.logs import decisions, forget_decisions
from megatron_tests.records import Notes
from megatron_tests.suites import fit_expert_sizes, fit_parallelism, fit_sizes

JOB = "MEGATRON_TESTS_JOB"
_NATIVE = ": native, "
_terminal = os.fdopen(os.dup(2), "w")  # pytest takes the other away from tests
_DOWNLOADS = "tests.test_utils.python_scripts.download_unit_tests_dataset"


@dataclasses.dataclass(frozen=True)
class Job:
    """What a launch is to do.

    Attributes:
        records: Folder of the notes.
        launch: Number of this launch of the suite.
        features: What to switch on; empty for native.
        skip: Tests that are done.
        only: The tests to run, or None for all.
        part: Number of the suite's part, from 0, and how many there are. A test's name says which one it is in.
        test_seconds: After which a test counts as hung, and ends its launch.
    """

    records: str
    launch: int
    features: str
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    test_seconds: float = 120.0
    part: tuple[int, int] = (0, 1)


class _Rank:
    """This process's part of a launch, as pytest's hooks see it."""

    def __init__(self, job: Job) -> None:
        self._job, self._counts = job, FUSED_CALLS
        rank = int(os.environ.get("RANK", "0"))
        self._notes = Notes(Path(job.records), rank, job.launch)
        self._outcome, self._why = "passed", ""
        self._has_crashed = False

    def set_up(self) -> None:
        """Makes Megatron what it is to be, before a test imports it."""
        _refuse_downloads()
        _stand_in_for_what_is_missing()
        _fit_sizes_to_world(int(os.environ.get("WORLD_SIZE", "1")))
        if self._job.features:
            import ditron_train.megatron

            ditron_train.megatron.apply(features=self._job.features)
            self._counts.install(self._job.features.split(","))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out what is done, or not asked for; notes the rest."""
        job, skip, (number, count) = self._job, set(self._job.skip), self._job.part
        mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == number]
        kept = [item for item in mine if item.nodeid not in skip and (job.only is None or item.nodeid in job.only)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
        self._notes.write(collected=[item.nodeid for item in items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes a file that cannot be imported: of its tests nothing is known."""
        if report.failed:
            logged = str(report.longrepr).strip().splitlines() or [""]
            self._notes.write(uncollected=report.nodeid, why=logged[-1][-300:])

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Notes that a test begins, and how it ended."""
        self._notes.write(test=item.nodeid)
        self._outcome, self._why = "passed", ""
        self._counts.take()
        forget_decisions()
        begin = time.monotonic()
        with self._limit(item.nodeid):
            yield
        seconds, native = round(time.monotonic() - begin, 2), [line for line in decisions() if _NATIVE in line]
        self._notes.write(
            test=item.nodeid, outcome=self._outcome, ran=self._counts.take(), why=self._why, native=native,
            seconds=seconds,
        )  # fmt: skip
        if self._outcome == "failed" and _is_device_lost():
            os._exit(1)  # every later test would fail, too

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test fails with any of its phases."""
        if report.failed:
            self._outcome = "failed"
            self._why = self._why or str(report.longrepr)[-2000:]
        elif report.skipped and self._outcome == "passed":
            self._outcome = "skipped"

    @contextmanager
    def _limit(self, test: str) -> Iterator[None]:
        timer = threading.Timer(self._job.test_seconds, self._abort, [test])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _abort(self, test: str) -> None:
        self._notes.write(test=test, outcome="hung", why=f"not done after {self._job.test_seconds:g} s")
        faulthandler.dump_traceback(file=_terminal)
        os._exit(1)


def _refuse_downloads() -> None:
    """Megatron's tests fetch data sets for a few of them, where a folder is empty; nothing is fetched here."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("nothing is fetched")

    module = types.ModuleType(_DOWNLOADS)
    module.download_and_extract_asset = refuse  # type: ignore[attr-defined]
    sys.modules[_DOWNLOADS] = module


def _stand_in_for_what_is_missing() -> None:
    """The CPU where there is no GPU, and the package below Megatron's Muon, which is on no index."""
    import torch

    from ditron_train.cpu import emerging_optimizers

    if not torch.cuda.is_available():
        _run_on_cpu()
    emerging_optimizers.install()


def _run_on_cpu() -> None:
    import torch
    import torch.distributed as dist

    from ditron_train.cpu import interpreter, megatron_shim

    interpreter.install()
    megatron_shim.install()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    memory = types.SimpleNamespace(major=9, minor=0, total_memory=1 << 30, multi_processor_count=8, name="CPU")
    answers = {
        "is_available": True,
        "device_count": world_size,
        "get_device_properties": memory,
        "mem_get_info": (1 << 29, 1 << 30),
        "get_device_capability": (9, 0),
        "is_current_stream_capturing": False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    if importlib.util.find_spec("transformer_engine") is None:
        import megatron.core.utils as utils
        from packaging.version import Version

        utils._te_version = Version("0")  # Megatron's tests ask for it without asking whether it is there
    native = dist.init_process_group
    dist.init_process_group = lambda backend=None, *args, **kwargs: native("gloo", *args, **kwargs)


def _fit_sizes_to_world(world_size: int) -> None:
    """Tests that are written for 8 ranks get smaller groups on fewer, and configurations that say the same."""
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig

    make_groups, check = parallel_state.initialize_model_parallel, ModelParallelConfig.__post_init__

    @functools.wraps(make_groups)
    def make_smaller_groups(
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        *args: Any,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        tensor, pipeline, context = fit_sizes(
            world_size, tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size
        )
        sliced = tensor if expert_tensor_parallel_size is None else expert_tensor_parallel_size
        expert, slices = fit_expert_sizes(world_size, pipeline, expert_model_parallel_size, sliced)
        make_groups(
            tensor, pipeline, virtual_pipeline_model_parallel_size if pipeline > 1 else None, *args,
            context_parallel_size=context, expert_model_parallel_size=expert,
            expert_tensor_parallel_size=None if expert_tensor_parallel_size is None else slices, **kwargs,
        )  # fmt: skip

    @functools.wraps(check)
    def check_smaller(self: Any) -> None:
        sizes = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size)
        fitting = fit_sizes(world_size, *sizes)
        self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size = fitting
        sliced = self.expert_tensor_parallel_size
        expert, slices = fit_expert_sizes(
            world_size, fitting[1], self.expert_model_parallel_size, fitting[0] if sliced is None else sliced
        )
        self.expert_model_parallel_size = expert
        self.expert_tensor_parallel_size = sliced if sliced is None else slices
        if fitting[1] == 1:
            self.virtual_pipeline_model_parallel_size = None
        check(self)

    parallel_state.initialize_model_parallel = make_smaller_groups
    ModelParallelConfig.__post_init__ = check_smaller
    try:
        configs = importlib.import_module("tests.unit_tests.determinism.configs")
    except ModuleNotFoundError:  # older than these tests
        return
    for cell in configs.PARALLELISM_CONFIGS:
        fit_parallelism(world_size, cell.values[0])


def _is_device_lost() -> bool:
    """Whether a kernel's fault has made the GPU unusable for this process."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before Megatron's own conftest imports anything."""
    values = json.loads(Path(os.environ[JOB]).read_text(encoding="utf-8"))
    rank = _Rank(Job(**values))
    rank.set_up()
    early_config.pluginmanager.register(rank, "ditron_train.megatron_tests")
