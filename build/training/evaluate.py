"""How well a checkpoint does on what is held out.

python build/training/evaluate.py rooms --workers 15 --policies reference,max1,max6,two-tile
python build/training/evaluate.py documents --pages 200 --workers 15 --failures failures | python loadtest/record.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("default_model", "document_model"))

import evaluate_documents
import evaluate_rooms

BUILD = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = parser.add_subparsers(required=True)
    for name, folder, module in (
        ("rooms", "default_model", evaluate_rooms),
        ("documents", "document_model", evaluate_documents),
    ):
        model = models.add_parser(name, help=module.__doc__)
        model.add_argument("--checkpoint", type=Path, default=BUILD / folder / "checkpoint")
        model.add_argument("--workers", type=int, default=1, help="processes that render")
        module.add_arguments(model)
        model.set_defaults(report=module.report)
    arguments = parser.parse_args(argv)
    arguments.report(arguments)


if __name__ == "__main__":
    main()
