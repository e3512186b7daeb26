"""Sums whose order no data shows: native where bits are to be compared, and only there."""

import pytest
import torch

pytest.importorskip("megatron.core")

from ditron_train.gemm.order_probe import HIDDEN_TERMS
from ditron_train.megatron.shared.values import unsupported_reason_hidden

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("policy", ["strict", "bits", "fast", "force"])
def test_they_are_native_where_bits_are_compared(policy, monkeypatch):
    monkeypatch.setenv("DITRON_POLICY", policy)
    compares = policy in ("strict", "bits")
    for sizes in ((HIDDEN_TERMS, 64, 64), (64, HIDDEN_TERMS, 64), (64, 64, 1)):
        assert (unsupported_reason_hidden(GPU, *sizes) is not None) == compares
        assert unsupported_reason_hidden(CPU, *sizes) is None
    assert unsupported_reason_hidden(GPU, HIDDEN_TERMS + 1, 64, HIDDEN_TERMS + 1) is None
