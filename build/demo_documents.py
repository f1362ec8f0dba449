"""`tessera parse` by the default document model: a PDF of held-out pages, read by a real tritonserver on the CPU.

    make demo ARGS="--default documents"
    python build/demo_documents.py --pages 5 --out out

Prints for each page its characters, its character error rate and its layout F1, then both over all pages, as lines for
loadtest/record.py. --out keeps the PDF, what truly stands on its pages, and what `tessera parse` made of it. Exits 0
only if every page was parsed, and no worse than --cer and --layout-f1 say where they are given.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.table import Table

from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server
from tessera.settings.gpu import DEFAULT_MODELS
from tessera_command.cli import main as tessera

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "build" / "document_model"), str(ROOT / "build" / "training"), str(ROOT / "loadtest")]
REPOSITORY = ROOT / "model_repository"
DOTS_PER_INCH = 200
NOT_TEXT = ("table", "equation", "image")
RENAMED = {"list_item": "text"}
"""Kinds of blocks that MinerU's post-processing calls something else, whatever the model said."""
Blocks = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Score:
    """Of one page. ``edits`` make of the text that was read (blocks in reading order, a line each; without tables and
    formulas) the true one, of ``characters``; ``hits`` true blocks were found, of the right kind at an overlap of 0.5,
    and ``blocks`` counts both the true ones and those found."""

    characters: int
    edits: int
    hits: int
    blocks: int


def text(blocks: Blocks) -> str:
    return "\n".join(block["content"] or "" for block in blocks if block["type"] not in NOT_TEXT)


def score(expected: Blocks, got: Blocks) -> Score:
    """``expected`` as truth.json has a page's blocks, ``got`` as page-0001.json."""
    import document_scores as scores

    true = [(RENAMED.get(block["type"], block["type"]), tuple(block["box"])) for block in expected]
    found = [(block["type"], tuple(round(1000 * side) for side in block["bbox"])) for block in got]
    told = text(expected)
    return Score(len(told), scores.edits(told, text(got)), len(scores.matches(true, found)), len(true) + len(found))


def cer(pages: Sequence[Score]) -> float:
    return sum(page.edits for page in pages) / max(1, sum(page.characters for page in pages))


def layout_f1(pages: Sequence[Score]) -> float:
    return 2 * sum(page.hits for page in pages) / max(1, sum(page.blocks for page in pages))


def write_pages(out: Path, count: int, first: int = 0) -> None:
    """pages.pdf of held-out pages from number ``first`` on, scans as large as they were drawn; truth.json has for each
    page its blocks in reading order: kind, box in thousandths, answer."""
    import pages

    out.mkdir(parents=True, exist_ok=True)
    chosen = [pages.sample(first + index, "heldout") for index in range(count)]
    pictures = [Image.fromarray(page.picture) for page in chosen]
    pictures[0].save(out / "pages.pdf", save_all=True, append_images=pictures[1:], resolution=DOTS_PER_INCH, quality=92)
    truth = [
        [{"type": b.kind, "box": pages.thousandths(b.box, page), "content": b.answer} for b in page.blocks]
        for page in chosen
    ]
    (out / "truth.json").write_text(json.dumps(truth, indent=1, ensure_ascii=False) + "\n")


def parsed(out: Path, arguments: argparse.Namespace) -> list[Score]:
    """Writes the pages, parses them into ``out`` and scores them. Raises SystemExit where a page was not parsed."""
    write_pages(out, arguments.pages, arguments.first)
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    with Server(
        ServerOptions(REPOSITORY, checkpoint=arguments.checkpoint, settings={"device": "cpu"}, **ports)
    ) as server:
        if code := tessera(["parse", str(out / "pages.pdf"), "-o", str(out / "parsed"), "--url", server.grpc_url]):
            raise SystemExit(code)
    truth = json.loads((out / "truth.json").read_text())
    files = [out / "parsed" / "pages.pdf" / f"page-{number:04}.json" for number in range(1, arguments.pages + 1)]
    return [score(page, json.loads(file.read_text())["blocks"]) for page, file in zip(truth, files)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=REPOSITORY / DEFAULT_MODELS["documents"])
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="number of the first held-out page")
    parser.add_argument("--out", type=Path, help="folder for the results, which are thrown away without it")
    parser.add_argument("--cer", type=float, default=float("inf"), help="the most that is well")
    parser.add_argument("--layout-f1", type=float, default=0.0, help="the least that is well")
    arguments = parser.parse_args(argv)
    if not arguments.checkpoint.is_dir():
        parser.error(f"--checkpoint: no folder {arguments.checkpoint.resolve()}")
    with nullcontext(arguments.out) if arguments.out else tempfile.TemporaryDirectory(prefix="tessera-demo-") as out:
        pages = parsed(Path(out), arguments)
    view = Table(title="Pages that the model has never seen")
    for name in ("page", "characters", "character error rate", "layout F1"):
        view.add_column(name, justify="right")
    for number, page in enumerate(pages, 1):
        view.add_row(str(number), str(page.characters), f"{cer([page]):.2%}", f"{layout_f1([page]):.3f}")
    Console(stderr=True).print(view)
    from figures import emit

    found = {"cer": cer(pages), "layout_f1": layout_f1(pages)}
    for name, value in found.items():
        notes = {"pages": arguments.pages, "first": arguments.first}
        emit(f"docs.parse_{name}", round(value, 4), "share", "python build/demo_documents.py", **notes)
    return 0 if found["cer"] <= arguments.cer and found["layout_f1"] >= arguments.layout_f1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
