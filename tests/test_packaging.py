"""The sdist and the wheel build, hold what they must and install."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ditron_train import __version__
from ditron_train.runtime.versions import SUPPORTED, is_supported

ROOT = Path(__file__).parent.parent
_BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # the backend rewrites sys.argv
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""


def _run(*command: str | Path, cwd: Path) -> str:
    environment = {**os.environ, "REPO_URL": "https://example.org/a/repository", "SITE_URL": ""}
    command = tuple(map(str, command))
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of the checkout and a wheel built from that sdist alone."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "ditron_train", source / "ditron_train", ignore=shutil.ignore_patterns("__pycache__"))
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    _run(sys.executable, "-c", _BUILD, first, cwd=source)
    (archive,) = first.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(second)  # our own archive; Python 3.11.2 has no filters yet
    (unpacked,) = second.iterdir()
    _run(sys.executable, "-c", _BUILD, second, cwd=unpacked)
    return second


def test_wheel_holds_every_module_and_the_data(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "ditron_train").rglob("*.py")}
    expected |= {"ditron_train/py.typed", "ditron_train/data/workloads.json"}
    expected |= {p.relative_to(ROOT).as_posix() for p in (ROOT / "ditron_train" / "data" / "tuning").glob("*.json")}
    assert expected <= names
    assert not [name for name in names if name.startswith(("tests/", "examples/"))]


def test_metadata(dist: Path) -> None:
    text = _metadata(dist)
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert "ditron_train contributors" in text
    for extra in ("megatron", "cuda", "nvshmem", "te", "bench", "docs", "test"):
        assert f"\nProvides-Extra: {extra}\n" in text
    assert "\nProject-URL: Issues, https://example.org/a/repository/issues\n" in text
    assert "\nProject-URL: Documentation" not in text  # no SITE_URL was set
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert sorted(line.split()[1].split(">")[0].split("<")[0] for line in required) == [
        "numpy",
        "packaging",
        "rich",
        "torch",
        "triton",
    ]


def test_the_readme_of_a_package_index_shows_pictures_and_links_of_the_repository(dist: Path) -> None:
    description = _metadata(dist).partition("\n\n")[2]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", description, flags=re.DOTALL))
    assert any(mark for mark, _ in links) and len(links) > 20
    for mark, url in links:
        address, path = url.split("/raw/HEAD/" if mark else "/blob/HEAD/")
        assert address == "https://example.org/a/repository" and (ROOT / path.partition("#")[0]).is_file(), url
    assert "\nDescription-Content-Type: text/markdown" in _metadata(dist)


def test_the_version_is_the_one_of_the_changelog_and_the_citation() -> None:
    changelog, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    version, date = re.search(r"^## (\d[\d.]+), ([\d-]+)$", changelog, re.MULTILINE).groups()
    assert version == __version__
    assert f'\nversion: {version}\ndate-released: "{date}"\n' in citation


def test_wheel_installs(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    target = tmp_path / "target"
    _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, wheel, cwd=tmp_path)
    check = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import ditron_train; from ditron_train.data import load_workloads\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules\n"
        "print(ditron_train.__file__, ditron_train.__version__, len(load_workloads()['ag_gemm']['shapes']))"
    )
    where, version, shapes = _run(sys.executable, "-c", check, cwd=tmp_path).split()
    assert Path(where).is_relative_to(target)
    assert (version, shapes) == (__version__, "6")


def _metadata(dist: Path) -> str:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"ditron_train-{__version__}.dist-info/METADATA").decode()


def test_scripts_install_what_the_metadata_asks_for(dist: Path) -> None:
    purposes = runpy.run_path(str(ROOT / "scripts" / "environment.py"))["PURPOSES"]
    needed = {"always": set(), "test": set(), "bench": set(), "megatron": set()}
    for line in re.findall(r"^Requires-Dist: (.+)$", _metadata(dist), re.MULTILINE):
        name = re.match(r"[A-Za-z0-9-]+", line).group()
        extra = re.search(r'extra == "(\w+)"', line)
        needed.setdefault(extra.group(1) if extra else "always", set()).add(name)
    assert needed["always"] | needed["bench"] | needed["megatron"] <= set(purposes["quickstart"])
    assert needed["always"] | needed["test"] <= set(purposes["test"])


def test_pinned_versions_are_supported() -> None:
    scripts = runpy.run_path(str(ROOT / "scripts" / "environment.py"))
    pins = scripts["read_pins"]()
    assert {"torch", "triton", "numpy", "megatron-core"} <= set(pins)
    for entry in SUPPORTED:
        if entry.name in pins:
            assert is_supported(entry, pins[entry.name])
    torch = next(entry for entry in SUPPORTED if entry.name == "torch")
    assert is_supported(torch, scripts["CUDA_TORCH"])
    assert set(scripts["PURPOSES"]["test"]) <= set(pins)
