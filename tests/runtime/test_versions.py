"""The supported ranges: what is refused, and that the message says enough."""

from __future__ import annotations

import pytest

from ditron_train.runtime import versions
from ditron_train.runtime.errors import VersionError

GOOD = {
    "python": "3.12.3",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "numpy": "2.3.5",
    "megatron-core": "0.16.1",
    "nvshmem4py": "0.4.1",
    "nvidia-nvshmem": "3.4.5",
    "transformer-engine": "2.10.0+abc",
}


def test_known_good_versions_pass() -> None:
    assert set(GOOD) == {entry.name for entry in versions.SUPPORTED}
    assert versions.version_problems(GOOD) == []


def test_optional_ones_may_be_missing() -> None:
    assert versions.version_problems({**GOOD, "megatron-core": None, "transformer-engine": None}) == []


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("python", "3.9.18"),
        ("torch", "2.10.0"),
        ("torch", "not a version"),
        ("triton", "3.7.0"),
        ("numpy", "2.4.0"),
        ("megatron-core", "0.17.0"),
        ("nvidia-nvshmem", "3.8.0"),
        ("transformer-engine", "2.13.0"),
    ],
)
def test_outside_the_range(name: str, version: str) -> None:
    (problem,) = versions.version_problems({**GOOD, name: version})
    entry = next(entry for entry in versions.SUPPORTED if entry.name == name)
    assert name in problem and version in problem and versions.specifier_here(entry) in problem
    assert name == "python" or problem.endswith(f"; {versions.pip_command(name)}")


def test_missing_required() -> None:
    (problem,) = versions.version_problems({**GOOD, "triton": None})
    assert "triton is not installed" in problem


def test_check_names_every_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_versions", lambda: {**GOOD, "torch": "1.0", "numpy": None})
    with pytest.raises(VersionError, match=r"torch 1\.0 .*; numpy is not installed"):
        versions.check_versions()


def test_this_machine_is_supported() -> None:
    versions.check_versions()


def test_numpy_is_limited_where_kernels_are_interpreted(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert versions.version_problems({**GOOD, "numpy": "2.5.2"})
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not versions.version_problems({**GOOD, "numpy": "2.5.2"})
