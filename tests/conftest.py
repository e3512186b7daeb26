"""Without a GPU, kernels run in Triton's interpreter, which is decided when they are imported.

Checks that compile kernels start a process of their own with ``TRITON_INTERPRET=0``.
"""

import gc
import os
import signal
import sys

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "DITRON_TEST_RAISES", "1"
)  # an unforeseen error of the fused path is not to look like stock Megatron
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as background jobs of a script have it, and what they start inherits
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# A busy machine makes any example slow: time is the test's own limit, not an example's. The same examples in every
# run, so that what a change is told is about that change; `--hypothesis-profile=search` draws others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("any_machine", settings.get_profile("search"), derandomize=True)
settings.load_profile("any_machine")


def pytest_collection_finish() -> None:
    """Thousands of tests are not looked through for garbage again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def warm_python(monkeypatch):
    """``sys.executable`` is a program that has imported torch, triton and megatron-core already: for tests of commands
    that are about what comes after that."""
    from tests.support import warm_python

    monkeypatch.setattr(sys, "executable", warm_python.executable())


@pytest.fixture
def megatron_training(tmp_path):
    """``megatron_training(script, arguments=..., training=...)``: path of a script beside stand-ins for modules of
    ``megatron.training``, which is in no wheel."""

    def write(script: str, **modules: str):
        package = tmp_path / "megatron" / "training"
        package.mkdir(parents=True)
        for name, source in {"__init__": "", **modules}.items():
            (package / f"{name}.py").write_text(source)
        path = tmp_path / "train.py"
        path.write_text(script)
        return path

    return write
