"""Writes what `tessera sample` hands out, into clients/tessera_command/samples: files small enough to be tracked.

    python build/write_samples.py

rooms: of the default model's held-out pictures the first twelve whose files are small, no two of them with the same
class in question, whatever the model makes of them; labels.csv has questions and answers, as `tessera plan` reads them.
documents: a PDF of one of the document model's held-out pages, again the first small one.
"""

import csv
import sys
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "build" / "default_model"), str(ROOT / "build" / "document_model")]
SAMPLES = ROOT / "clients" / "tessera_command" / "samples"
PICTURES, MOST_PICTURE_BYTES = 12, 26_000
MOST_PAGE_BYTES, QUALITY, DOTS_PER_INCH = 70_000, 60, 200


def rooms(folder: Path) -> None:
    import scene

    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    asked = set()
    for item in scene.heldout(400):
        subject = (item.kind, item.cls)
        if subject in asked or item.width * item.height > 800 * 600:
            continue
        picture = scene.encode_jpeg(scene.sample(item.scene_seed, "heldout"))
        if len(picture) > MOST_PICTURE_BYTES:
            continue
        asked.add(subject)
        file = f"room-{len(rows) + 1:02}.jpg"
        (folder / file).write_bytes(picture)
        rows.append({"file": file, "question": item.question, "answer": item.answer, "class": item.cls})
        rows[-1]["kind"] = item.kind
        if len(rows) == PICTURES:
            break
    with open(folder / "labels.csv", "w", newline="", encoding="utf-8") as table:
        writer = csv.DictWriter(table, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def documents(folder: Path) -> None:
    import pages

    folder.mkdir(parents=True, exist_ok=True)
    drawn = (pages.sample(index, "heldout").picture for index in count())
    for picture in drawn:
        page = BytesIO()
        Image.fromarray(picture).save(page, "PDF", resolution=DOTS_PER_INCH, quality=QUALITY)
        if page.tell() <= MOST_PAGE_BYTES:
            (folder / "page.pdf").write_bytes(page.getvalue())
            return


if __name__ == "__main__":
    rooms(SAMPLES / "rooms")
    documents(SAMPLES / "documents")
    print(sum(file.stat().st_size for file in SAMPLES.rglob("*.*")) >> 10, "KiB")
