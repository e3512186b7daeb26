"""The site: links of documents as mkdocs needs them, and the pages that it adds. CI makes the site itself."""

from __future__ import annotations

import re
from pathlib import Path

from documents import site

ROOT = Path(__file__).parents[2]


def test_links_follow_the_pages() -> None:
    text = "[a](tp.md#results) ![b](../../benchmarks/pictures/x.png) [c](https://a.b/c.md) [d](#here)"
    moved = site.move_links(text, "docs/measurements/index.md")
    assert moved == "[a](tp.md#results) ![b](../benchmarks/pictures/x.png) [c](https://a.b/c.md) [d](#here)"
    assert (
        site.move_links("[a](docs/glossary.md) [b](CHANGELOG.md)", "README.md") == "[a](glossary.md) [b](CHANGELOG.md)"
    )
    assert site.move_links("[a](../docs/glossary.md)", "benchmarks/README.md") == "[a](../glossary.md)"


def test_what_is_linked_outside_of_the_documents_is_added() -> None:
    files = site.linked_files()
    assert {"README.md", "CONTRIBUTING.md", "benchmarks/README.md", "ditron_train/tp/ag_gemm.py"} <= files
    assert all((ROOT / path).is_file() for path in files)


def test_public_names_have_pages() -> None:
    names = site.public_names()["ditron_train.tp"]
    assert names["ag_gemm"] == "ditron_train.tp.ag_gemm.ag_gemm"  # the module hides the function
    assert names["column_linear"] == "ditron_train.tp.column_linear"
    linked = site.link_names("## `ditron_train.tp`\n\n| `ag_gemm` | All-gather |\n")
    assert linked == "## `ditron_train.tp`\n\n| [`ag_gemm`][ditron_train.tp.ag_gemm.ag_gemm] | All-gather |\n"


def test_the_site_lists_every_page_once() -> None:
    listed = re.findall(r"([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages |= {path for path in site.linked_files() if path.endswith(".md")}
    pages |= {f"reference/api/{module}.md" for module in site.public_names()}
    assert sorted(listed) == sorted(pages)
