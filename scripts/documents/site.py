"""A hook of mkdocs (``mkdocs.yml``): documents link to each other as files of the repository, and the site follows.

The site holds ``docs/``, the README as its first page, and every file that these link to, at its own path.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
API = ROOT / "docs" / "reference" / "api.md"
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)[^)#\s]+")


def linked_files() -> set[str]:
    """The README and all that it leads to, link by link, and that is not in ``docs/``: paths in the repository."""
    seen: set[str] = set()
    front = ["README.md"]
    while front:
        path = front.pop()
        if path not in seen:
            seen.add(path)
            text = (ROOT / path).read_text(encoding="utf-8") if path.endswith(".md") else ""
            front += [normpath(join(dirname(path), target)) for target in _LINK.findall(text)]
    return {path for path in seen if not path.startswith("docs/")}


def move_links(markdown: str, source: str) -> str:
    """Links of the document at ``source`` (its path in the repository), as the site holds what they lead to."""
    folder = dirname(source.removeprefix("docs/")) or "."

    def move(link: re.Match[str]) -> str:
        target = normpath(join(dirname(source), link[0]))
        return relpath(target.removeprefix("docs/"), folder)

    return _LINK.sub(move, markdown)


def public_names() -> dict[str, dict[str, str]]:
    """By module and name: the path of what the table of public names lists."""
    sections = re.split(r"^## `([\w.]+)`$", API.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found: dict[str, dict[str, str]] = {}
    for module, section in zip(sections[::2], sections[1::2]):
        folder = ROOT / module.replace(".", "/")
        for name in re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE):
            is_hidden = (folder / f"{name}.py").exists()  # by the module of the same name
            found.setdefault(module, {})[name] = f"{module}.{name}.{name}" if is_hidden else f"{module}.{name}"
    return found


def link_names(markdown: str) -> str:
    """The tables of public names, with links to what the docstrings say."""
    for module, names in public_names().items():
        before, heading, section = markdown.partition(f"## `{module}`\n")
        for name, path in names.items():
            section = section.replace(f"| `{name}` |", f"| [`{name}`][{path}] |", 1)
        markdown = before + heading + section
    return markdown


def on_files(files: Any, config: Any) -> Any:
    """Adds what is outside ``docs/``, and a page for each public module."""
    from mkdocs.structure.files import File

    for path in sorted(linked_files()):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for module, names in public_names().items():
        options = "{members: false, show_root_heading: false, show_root_toc_entry: false}"
        whole = f"# {module}\n\n::: {module}\n    options: {options}\n"
        text = "\n".join([whole, *(f"::: {path}\n" for path in names.values())])
        files.append(File.generated(config, f"reference/api/{module}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Changes what mkdocs is about to render."""
    path = page.file.src_uri
    if path == "reference/api.md":
        markdown = link_names(markdown)
    return move_links(markdown, f"docs/{path}" if (ROOT / "docs" / path).exists() else path)
