"""Dependencies come from ``ditron_train/runtime/versions.py``, where the supported ranges are stated once.

URLs come from the environment, as the site's do (``mkdocs.yml``): whoever publishes a build sets ``REPO_URL`` and
``SITE_URL``. With ``REPO_URL`` the README of the build shows the repository's pictures and links to its documents, so
that it also reads well on a package index; in a checkout its paths stay relative.
"""

import os
import re
import runpy
from pathlib import Path

from setuptools import setup

_versions = runpy.run_path(str(Path(__file__).parent / "ditron_train" / "runtime" / "versions.py"))
_ranges = {entry.name: entry.specifier for entry in _versions["SUPPORTED"]}


def _pinned(name: str, distribution: str = "") -> str:
    return f"{distribution or name}{_ranges[name]}"


_MEGATRON = [_pinned("megatron-core")]
_BENCH = ["matplotlib"]
_REPO, _SITE = os.environ.get("REPO_URL", "").rstrip("/"), os.environ.get("SITE_URL", "")
_README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|mailto:|#)([^)\s]+)\)")


def _with_urls(markdown: str, repository: str) -> str:
    """The document with URLs instead of relative paths, of pictures (``raw``) and of what it links to (``blob``)."""
    kinds = {"!": "raw", "": "blob"}
    return _LINK.sub(lambda link: f"{link[1]}{link[2]}({repository}/{kinds[link[1]]}/HEAD/{link[3]})", markdown)


_URLS = {
    "Repository": _REPO,
    "Issues": _REPO and f"{_REPO}/issues",
    "Changelog": _REPO and f"{_REPO}/blob/HEAD/CHANGELOG.md",
    "Documentation": _SITE,
}

setup(
    long_description=_with_urls(_README, _REPO) if _REPO else _README,
    long_description_content_type="text/markdown",
    project_urls={name: url for name, url in _URLS.items() if url},
    python_requires=_ranges["python"],
    install_requires=[_pinned("torch"), _pinned("triton"), _pinned("numpy"), "packaging", "rich"],
    extras_require={
        "megatron": _MEGATRON,
        "cuda": ["cuda-bindings"],
        "nvshmem": [_pinned("nvshmem4py", "nvshmem4py-cu13"), _pinned("nvidia-nvshmem", "nvidia-nvshmem-cu13")],
        "te": [_pinned("transformer-engine", "transformer-engine[pytorch]")],
        "bench": _BENCH,
        "docs": ["mkdocs", "mkdocs-material", "mkdocstrings-python"],
        "test": ["pytest", "pytest-timeout", "hypothesis", "setuptools", "psutil", "einops", *_BENCH, *_MEGATRON],
    },
)
