"""Makes the README's generated parts, the page of results and its pictures anew (--check: only says whether they are
current)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> int:
    """Writes what changed; with ``--check`` returns 1 where something would change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    from ditron_train.tools.bench.document import RESULTS_PAGE, picture_path, render, render_results, roofline_path
    from ditron_train.tools.bench.pictures import draw_speedups
    from ditron_train.tools.bench.roofline import draw_roofline, has_roofline
    from ditron_train.tools.results import TRAINING, measurement_files, read_results

    if not arguments.check:
        for path in measurement_files(ROOT):
            if path.stem == TRAINING:  # a picture of one bar each says nothing
                continue
            stamp, rows = read_results(path)
            draw_speedups(rows, stamp, ROOT / picture_path(path.relative_to(ROOT)))
            if has_roofline(rows):
                draw_roofline(rows, stamp, ROOT / roofline_path(path.relative_to(ROOT)))
    readme, page = ROOT / "README.md", ROOT / RESULTS_PAGE
    wanted = {readme: render(readme.read_text(encoding="utf-8"), ROOT), page: render_results(ROOT)}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if arguments.check:
            print(f"{path.relative_to(ROOT)} is out of date: python scripts/readme.py")
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
