"""The primitives inside kernels on GPUs: the bodies of the CPU's tests, and what threads are called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
sys.path.insert(0, str(Path(__file__).parent.parent / "lang"))
import bodies_lang as bodies  # noqa: E402
import kernels_lang as kernels  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _on_this_gpu(device):
    bodies.use(device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first_epoch", [0, 2**31 - 3])
def test_an_all_gather_made_of_primitives(dtype, first_epoch):
    last = (first_epoch + 6 + 2**31) % 2**32 - 2**31
    assert bodies.all_gather(70_000, dtype, first_epoch, 6) == [last] * dist.get_world_size()


def test_puts_gets_and_signals():
    assert bodies.shared_memory_calls()


def test_different_signatures_are_one_error_on_every_rank():
    words = [""] * dist.get_world_size()
    dist.all_gather_object(words, bodies.different_signatures())
    assert len(set(words)) == 1 and words[0].startswith("MismatchError: lang.mismatch")


def test_a_wait_ends_at_the_deadline_and_says_whom_it_waited_for(monkeypatch):
    monkeypatch.setenv("DITRON_TIMEOUT_S", "0.5")
    name, fields = bodies.absent_peer()
    if dist.get_rank() == 0:
        assert name == "PeerTimeoutError"
        assert (fields["op"], fields["missing_rank"], fields["chunk"]) == ("lang.absent", 0, 7)
    dist.barrier()


def test_threads_have_names(device):
    out = torch.full((1,), -1, dtype=torch.int32, device=device)
    kernels.threads[(1,)](out, torch.zeros(1, dtype=torch.int32, device=device), TARGET=bodies.TARGET, num_warps=4)
    thread, lane = divmod(out.item(), 64)
    assert 0 <= thread < 128 and lane == thread % 32
