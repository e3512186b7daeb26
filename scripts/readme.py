"""Makes the generated parts of the documents, the pages of results and their pictures anew.

``--check`` only says whether they are current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def wanted_documents() -> dict[Path, str]:
    """Every document with a generated part, as it should be."""

    from ditron_train.tools.results import TRAINING, measurement_files, read_results
    from documents.drawings import draw_layers, draw_speedups, draw_steps, draw_timeline, timelines
    from documents.results import KINDS, PICTURES, picture_path, render, result_pages, result_parts, step_speedups
    from documents.validation import document_part
    from reference import PARTS

    results = result_parts(ROOT)
    parts = {"README.md": {name: results[name] for name in ("typical", "gains")}}
    parts |= {f"docs/measurements/{kind}.md": {kind: results[kind]} for kind in KINDS}
    parts["docs/measurements/index.md"] = {"steps": results["steps"]}
    parts["docs/measurements/predict.md"] = {"validation": lambda: document_part(ROOT)}
    pages = (parts | PARTS).items()
    wanted = {ROOT / page: render((ROOT / page).read_text(encoding="utf-8"), made) for page, made in pages}
    files = [path for path in measurement_files(ROOT) if path.stem != TRAINING]
    wanted |= {ROOT / picture_path(path.relative_to(ROOT)): draw_speedups(*read_results(path)) for path in files}
    wanted |= {
        ROOT / PICTURES / f"timeline-{op}.svg": draw_timeline(op, lanes) for op, lanes in timelines(ROOT).items()
    }
    wanted |= {ROOT / PICTURES / "layers.svg": draw_layers(ROOT)}
    wanted |= {ROOT / PICTURES / "steps.svg": draw_steps(step_speedups(ROOT))}
    return {**wanted, **{ROOT / page: text for page, text in result_pages(ROOT).items()}}


def main() -> int:
    """Writes what changed; with ``--check`` returns 1 if something would change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    wanted = wanted_documents()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if arguments.check:
            print(f"{path.relative_to(ROOT)} is out of date: python scripts/readme.py")
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
