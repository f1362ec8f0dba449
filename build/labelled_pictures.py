"""Writes a labelled folder of rendered pictures, for `tessera quantize --pictures` or `tessera recall --folder`.

    python build/labelled_pictures.py OUT --count 192

Training scenes by default: the held-out set (`tessera recall` without a folder) stays unseen.
"""

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "default_model"))

FIRST_SEED = 9_000_000


def main() -> None:
    import cv2

    import scene

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=192, help="pictures, one question each (%(default)s)")
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    cv2.setNumThreads(1)
    with open(arguments.out / "labels.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("file", "question", "answer", "class", "kind"))
        for index in range(arguments.count):
            drawn = scene.sample(FIRST_SEED + index, arguments.split)
            # Two of three ask about a hazard, as the held-out set does; the others go through all kinds.
            questions = scene.questions(drawn)
            wanted = [each for each in questions if each.kind == "presence" and each.cls in scene.HAZARDS]
            if index % 3 == 2:
                kind = scene.KINDS[index // 3 % len(scene.KINDS)]
                wanted = [each for each in questions if each.kind == kind] or wanted
            question = wanted[index % len(wanted)]
            name = f"{index:05d}.jpg"
            (arguments.out / name).write_bytes(scene.encode_jpeg(drawn))
            table.writerow((name, question.text, question.answer, question.cls, question.kind))


if __name__ == "__main__":
    main()
