"""The supported ranges: what is refused, and that the message says enough."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

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
        ("triton", "3.5.1"),
        ("numpy", "1.25.0"),
        ("megatron-core", "0.15.3"),
        ("transformer-engine", "2.9.0"),
    ],
)
def test_outside_the_range(name: str, version: str) -> None:
    (problem,) = versions.version_problems({**GOOD, name: version})
    entry = next(entry for entry in versions.SUPPORTED if entry.name == name)
    specifier = versions.specifier_here(entry, GOOD)
    assert name in problem and version in problem and specifier in problem
    assert name == "python" or problem.endswith(f"; {versions.pip_command(name, specifier)}")


def test_missing_required() -> None:
    (problem,) = versions.version_problems({**GOOD, "triton": None})
    assert "triton is not installed" in problem


def test_check_names_every_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_versions", lambda: {**GOOD, "torch": "1.0", "numpy": None})
    with pytest.raises(VersionError, match=r"torch 1\.0 .*; numpy is not installed"):
        versions.check_versions()


def test_this_machine_is_supported() -> None:
    versions.check_versions()


def test_numpy_is_limited_where_kernels_are_interpreted_by_triton_3_6(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert versions.version_problems({**GOOD, "numpy": "2.5.2"})
    assert not versions.version_problems({**GOOD, "triton": "3.7.1", "numpy": "2.5.2"})
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not versions.version_problems({**GOOD, "numpy": "2.5.2"})


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.16.0"), ("triton", "3.10.0"), ("transformer-engine", "2.21"), ("python", "3.14.1")],
)
def test_what_is_newer_is_tried_unless_refused(name: str, version: str) -> None:
    found = {**GOOD, "triton": "3.9.0", name: version}
    assert versions.version_problems(found) == []
    (warning,) = versions.version_warnings(found)
    assert f"other than what was tried: {name} {version} (tried: " in warning and "DITRON_VERSIONS=strict" in warning
    (problem,) = versions.version_problems(found, strict=True)
    assert f"{name} {version} is outside" in problem


def test_several_newer_libraries_are_one_line() -> None:
    (warning,) = versions.version_warnings({**GOOD, "torch": "2.16.0", "triton": "3.10.1"})
    assert "torch 2.16.0 (tried: >=2.11,<2.16), triton 3.10.1 (tried: " in warning


def test_the_setting_refuses_what_is_newer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(versions, "find_versions", lambda: {**GOOD, "triton": "3.11.0"})
    with caplog.at_level(logging.WARNING, "ditron_train"):
        assert versions.check_versions() and versions.check_versions()
    assert sum("other than what was tried: triton 3.11.0" in message for message in caplog.messages) == 1
    monkeypatch.setenv("DITRON_VERSIONS", "strict")
    with pytest.raises(VersionError, match="triton 3.11.0 is outside"):
        versions.check_versions()


@pytest.mark.parametrize(
    ("torch", "triton", "wanted"),
    [
        ("2.11.0+cu130", "3.6.0", None),
        ("2.11.0", "3.9.0", None),  # ran on GPUs
        ("2.12.1", "3.6.0", "3.7"),
        ("2.13.0+cpu", "3.6.0", None),  # a CPU build asks for none
        ("2.14.1", "3.7.1", "3.8"),
        ("2.15.0+cu132", "3.6.0", "3.9"),
        ("2.15.0+cu132", "3.9.0", None),
    ],
)
def test_a_mix_that_no_index_gives(torch: str, triton: str, wanted: str | None) -> None:
    problems = versions.version_problems({**GOOD, "torch": torch, "triton": triton, "numpy": "2.3.5"})
    assert len(problems) == (wanted is not None)
    if wanted is not None:
        assert torch in problems[0] and triton in problems[0] and problems[0].endswith(f"'triton=={wanted}.*'")


def test_every_torch_of_the_range_has_its_triton() -> None:
    entries = {entry.name: entry for entry in versions.SUPPORTED}
    assert [versions.triton_of(f"2.{minor}.0") for minor in range(11, 17)] == ["3.6", "3.7", "3.7", "3.8", "3.9", None]
    assert all(versions.is_supported(entries["triton"], f"{triton}.0") for _, triton in versions.PAIRS)


def test_nvshmem_is_checked_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {**GOOD, "nvidia-nvshmem": "3.3.9"}
    assert versions.version_problems(found) == []
    monkeypatch.setattr(versions, "find_versions", lambda: found)
    with pytest.raises(VersionError, match="nvidia-nvshmem 3.3.9 is outside"):
        versions.check_used("nvshmem4py", "nvidia-nvshmem")
    monkeypatch.setattr(versions, "find_versions", lambda: {**GOOD, "nvidia-nvshmem": "3.7.2"})  # torch 2.15 brings it
    versions.check_used("nvshmem4py", "nvidia-nvshmem")
    monkeypatch.setenv("DITRON_VERSIONS", "strict")
    with pytest.raises(VersionError, match="nvidia-nvshmem 3.7.2 is outside"):
        versions.check_used("nvshmem4py", "nvidia-nvshmem")


def test_a_library_that_is_there_twice_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [sentence for sentence in versions.version_warnings() if "installed" in sentence and "triton" in sentence]
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "triton-3.6.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 3.6.0\n")
    (warning,) = [s for s in versions.version_warnings() if s.startswith("triton is installed") and s not in before]
    assert f"what is in {tmp_path} (triton 3.6.0) comes first" in warning and warning.endswith("remove all but one")


def test_two_builds_of_nvshmem_are_said_where_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for cuda in ("cu12", "cu13"):
        folder = tmp_path / f"nvidia_nvshmem_{cuda}-3.4.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-nvshmem-{cuda}\nVersion: 3.4.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not any("nvshmem" in sentence for sentence in versions.version_warnings())
    with caplog.at_level(logging.WARNING, "ditron_train"):
        versions.check_used("nvidia-nvshmem")
    (logged,) = [message for message in caplog.messages if message.startswith("nvidia-nvshmem is installed")]
    assert "nvidia-nvshmem-cu13 3.4.5" in logged and "nvidia-nvshmem-cu12 3.4.5" in logged


def test_a_checkout_of_megatron_on_the_path_counts(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 17\nPATCH = 1\nPRE_RELEASE = ''\n")
    code = "from ditron_train.runtime.versions import find_versions; print(find_versions()['megatron-core'])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *(p or os.getcwd() for p in sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "0.17.1\n", done.stderr


def test_a_version_below_the_range_that_is_self_checked() -> None:
    for version in ("0.16.0rc0", "0.16.0rc0.dev130783"):
        here = {**GOOD, "megatron-core": version}
        assert versions.version_problems(here) == [] and versions.version_problems(here, strict=True)
        assert versions.newer_libraries(here) == [f"megatron-core {version}"]
    for version in ("0.16.0rc1", "0.16.0", "0.15.3"):
        assert versions.version_problems({**GOOD, "megatron-core": version})
