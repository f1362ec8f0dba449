"""Writes held-out pages as a PDF of scans and what stands on them, to see what `tessera parse` makes of them.

    python build/document_model/write_pages.py OUT --count 5

OUT/pages.pdf has a picture a page, which at 200 dots an inch is as large as it was drawn; OUT/truth.json has for each
page its blocks in reading order: kind, box in thousandths, answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from document_samples import thousandths
from PIL import Image

import pages

DOTS_PER_INCH = 200


def truth(page: pages.Page) -> list[dict[str, Any]]:
    return [{"type": b.kind, "box": thousandths(b.box, page), "content": b.answer} for b in page.blocks]


def write(out: Path, count: int, first: int = 0) -> None:
    """Pages ``first`` and following of the held-out ones."""
    out.mkdir(parents=True, exist_ok=True)
    chosen = [pages.sample(first + index, "heldout") for index in range(count)]
    pictures = [Image.fromarray(page.picture) for page in chosen]
    pictures[0].save(out / "pages.pdf", save_all=True, append_images=pictures[1:], resolution=DOTS_PER_INCH, quality=92)
    (out / "truth.json").write_text(json.dumps([truth(page) for page in chosen], indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="number of the first page")
    arguments = parser.parse_args()
    write(arguments.out, arguments.count, arguments.first)


if __name__ == "__main__":
    main()
