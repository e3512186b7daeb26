"""Makes the README's generated parts and the benchmark pictures anew (--check: only says whether the README is current)."""

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
    from ditron_train.bench.document import picture_path, render, roofline_path
    from ditron_train.bench.pictures import draw_speedups
    from ditron_train.bench.roofline import draw_roofline, has_roofline
    from ditron_train.bench.rows import RESULTS, read_results

    if not arguments.check:
        for path in sorted((ROOT / RESULTS).glob("*/*.json")):
            stamp, rows = read_results(path)
            draw_speedups(rows, stamp, ROOT / picture_path(path.relative_to(ROOT)))
            if has_roofline(rows):
                draw_roofline(rows, stamp, ROOT / roofline_path(path.relative_to(ROOT)))
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    current = render(text, ROOT)
    if current == text:
        return 0
    if arguments.check:
        print("README.md is out of date: python scripts/readme.py")
        return 1
    readme.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
