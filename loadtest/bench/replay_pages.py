"""Makes the set of pages that replay replays: real documents from other projects' packages, on a CPU.

    pip download --no-deps -r loadtest/bench/replay_sources.txt -d SOURCES
    npm pack pdf-parse@1.1.1 --pack-destination SOURCES
    python loadtest/bench replay_pages SOURCES -o replay.zip

Which pages, and what is asked about each, is recorded in replay_set.json; here they are rendered as `tessera parse`
renders them. This program wrote it at 2d7688df: it found the blocks of a page in its text layer by geometry, had
MinerU's own client say which of them become requests, with which prompt and parameters, and counted the tokens of their
text with Qwen's vocabulary.
"""

from __future__ import annotations

import argparse
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from bench import replay_set
from bench.replay_set import Page
from tessera_documents.sources import open_document

DPI = 200  # of `tessera parse`
RECORDED = Path(__file__).with_name("replay_set.json")


def rendered(sources: Path, pages: Sequence[Page]) -> Iterator[tuple[Page, Image.Image]]:
    """The pages from their packages. Raises SystemExit for a package that is missing."""
    with tempfile.TemporaryDirectory() as folder:
        pdf = Path(folder) / "page.pdf"
        for page in tqdm(pages, "pages"):
            place, number = page.name.rsplit(" ", 1)
            package, name = place.split("/", 1)
            if not (sources / package).exists():
                raise SystemExit(f"replay_pages: {sources} has no {package}; see docs/documents.md")
            with tarfile.open(sources / package) as archive:
                content = archive.extractfile(name)
                assert content is not None
                pdf.write_bytes(content.read())
            document = open_document(pdf)
            yield page, document.render(int(number) - 1, DPI)
            document.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="a folder of packages")
    parser.add_argument("-o", "--out", type=Path, default=Path("replay.zip"))
    arguments = parser.parse_args()
    client, pages = replay_set.parse(RECORDED.read_text())
    replay_set.write(arguments.out, client, rendered(arguments.sources, pages))
    print(f"{len(pages)} pages, {arguments.out.stat().st_size / 1e6:.1f} MB in {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
