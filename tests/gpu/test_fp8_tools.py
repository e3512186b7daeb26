"""``verify --fp8`` on Hopper GPUs with Transformer Engine: rows of every recipe, equal bits and state."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.distributed as dist

from tests.support import tool_arguments

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
pytest.importorskip("megatron.core")
MODEL = (
    "--hidden-size 1024 --num-attention-heads 16 --num-query-groups 8 --seq-length 1024 --ffn-hidden-size 4096 "
    "--group-query-attention --swiglu"
).split()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_verify_of_linear_layers_and_their_products(folder, monkeypatch, recipe):
    """What feature ``tp`` covers has rows of layers and products; of another recipe nothing is compared."""
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    from ditron_train.tools.fp8.recipes import unsupported_reason_native
    from ditron_train.tools.results import read_results
    from ditron_train.tools.verify.verifier import add_arguments, run

    monkeypatch.setenv("DITRON_POLICY", "bits")
    monkeypatch.chdir(folder)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = ["--column", "1024", "1024", "512", "--row", "1024", "512", "1024", "--repeat", "3", "--packages", "tp"]
    words = [*options, "--repetitions", "1", "--warmup", "1", "--output", str(folder / "out")]
    compares = unsupported_reason_native(recipe) is None
    assert run(tool_arguments.parse(parser, [*words, "--fp8", recipe, "--", *MODEL])) == (0 if compares else 1)
    dist.barrier()
    files = list(folder.glob("**/*.json"))
    if not compares:
        assert not files
        return
    rows = read_results(files[0])[1]
    assert {row.dtype for row in rows} == {f"fp8_{recipe}"} and all(row.bitwise_equal for row in rows)
    assert {row.op for row in rows} == {"ag_gemm", "gemm_rs", "column_linear", "row_linear"}
