"""What is overridden can be called as Megatron calls it, in every version of which signatures were recorded.

``python -m tests.support.megatron_signatures CHECKOUT`` records those of another version.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.support import megatron_signatures as signatures

megatron = pytest.importorskip("megatron.core")

RECORD = json.loads(signatures.RECORD.read_text(encoding="utf-8"))


def test_the_record_is_what_is_installed_here() -> None:
    core = Path(megatron.__path__[0])
    version = signatures.written_version(core)
    if version not in RECORD:
        pytest.skip(f"signatures of {version} are not recorded")
    assert signatures.native_signatures(core) == RECORD[version], "record them again"


@pytest.mark.parametrize("version", RECORD)
def test_overrides_take_what_each_version_passes(version: str) -> None:
    overrides = {key: fused for key, fused in signatures.our_overrides().items() if key in RECORD[version]}
    reasons = {
        key: signatures.unsupported_reason_callable_as(fused, RECORD[version][key]) for key, fused in overrides.items()
    }
    assert len(overrides) > 20 and not {key: reason for key, reason in reasons.items() if reason is not None}


@pytest.mark.parametrize("version", RECORD)
def test_arguments_of_functions_are_known(version: str) -> None:
    """One that comes anew has to be looked at: is it handed on, or a reason to run natively?"""
    from ditron_train.megatron.compat import config, muon

    def names(key: str) -> set[str]:
        arguments = ast.parse(f"def f({RECORD[version][key]}): ...").body[0].args
        return {one.arg for one in arguments.args + arguments.kwonlyargs}

    new = {"gtp_remat_size", "output_dtype"}  # asked for by unsupported_reason_arguments
    linear = names("linear_with_grad_accumulation_and_async_allreduce") - {"input", "weight"}
    assert linear <= config._KNOWN_ARGUMENTS | new
    common = {muon._COMMON_NAMES.get(name, name) for name in names("TensorParallelMuon.__init__") - {"self"}}
    assert common - muon._ARGUMENTS <= {"use_syrk"} and muon._ARGUMENTS <= common
    assert names("weighted_bias_swiglu_impl") - {"clamp_value"} == {"input", "bias", "weights", "fp8_input_store"}


def test_what_cannot_be_called_alike_is_found() -> None:
    def unsupported_reason(fused: str, native: str) -> str | None:
        return signatures.unsupported_reason_callable_as(fused, native)

    assert unsupported_reason("self, x, y=1", "self, x, y=2") is None
    assert unsupported_reason("self, x, **kwargs", "self, x, y=2, *, z") is None
    assert unsupported_reason("self, *args, **kwargs", "self, x, y") is None
    assert unsupported_reason("self, x", "self, x, y=2") == "y is not taken"
    assert unsupported_reason("self, x, **kwargs", "self, x, y") == "y is not taken"
    assert unsupported_reason("self, y, x", "self, x, y") == "x is not taken"
    assert unsupported_reason("self, x, *, z=1", "self, x, *, w=1") == "w is not taken"
    assert unsupported_reason("self, x, y", "self, x") == "y is asked for"
