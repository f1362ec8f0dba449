"""Makes the set of pages that replay replays: real documents from other projects' packages, on a CPU.

    pip download --no-deps -r loadtest/bench/replay_sources.txt -d SOURCES
    npm pack pdf-parse@1.1.1 --pack-destination SOURCES
    python loadtest/bench replay_pages SOURCES -o replay.zip

Pages with a text layer are rendered as `tessera parse` renders them, and their blocks found in the text layer
(pdf_blocks.py). Which of these become requests, with which prompt and parameters, MinerU's own client says. An answer
has as many tokens as the block's own text (replay_tokens.py), a layout as many as its boxes take in MinerU's grammar,
and each one more for its end. Equal packages give equal sets.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from statistics import fmean, median

import pypdfium2
from counting import percentile
from PIL import Image
from tqdm import tqdm

from bench import pdf_blocks, replay_set
from bench.replay_set import Page, Request
from bench.replay_tokens import Tokens
from tessera_documents import TesseraVlmClient, mineru_client
from tessera_documents.job import quiet
from tessera_documents.sources import open_document

DPI = 200  # of `tessera parse`
VOCABULARY = "qwen.tiktoken"
LEAST_CHARACTERS = 200  # fewer are no text layer
MOST_CROPS = 30  # more are a form, or a figure's labels
STRANGE, LONELY = 0.02, 0.25  # of the characters, of the words: more are a garbled text layer
MEAN_TOKENS, MEAN_CROPS = 900, 12
MOST_TOKENS = 2048  # of an answer; the rest is left out


class Reader:
    """What MinerU's client asks about a page."""

    def __init__(self, tokens: Tokens) -> None:
        quiet()
        self._tokens = tokens
        with TesseraVlmClient() as vlm:
            self._helper = mineru_client(vlm).helper
            kinds = {
                kind: {
                    "prompt": self._helper.prompts[kind],
                    "sampling": vlm.options(self._helper.sampling_params[kind]),
                }
                for kind in ("[layout]", "[default]", "table")
            }
            system = vlm.system_prompt
        for kind in kinds.values():
            kind["sampling"] = {name: value for name, value in kind["sampling"].items() if value is not None}
        self.client = replay_set.Client(
            version=metadata.version("mineru-vl-utils"),
            system=system,
            kinds=kinds,
            layout_size=self._helper.layout_image_size,
            min_edge=self._helper.min_image_edge,
            max_ratio=self._helper.max_image_edge_ratio,
        )

    def requests(self, blocks: list[pdf_blocks.Block], page: Image.Image) -> tuple[Request, ...]:
        """The layout, and the crops that the client would ask about were these blocks the answer."""
        answer = "\n".join(
            "<|box_start|>{:03} {:03} {:03} {:03}<|box_end|><|ref_start|>{}<|ref_end|><|rotate_up|>".format(
                *block.box, block.kind
            )
            for block in blocks
        )
        layout = self._tokens.layout([(block.kind, block.box) for block in blocks])
        requests = [Request("[layout]", min(MOST_TOKENS, layout + 1))]
        by_place = {(block.kind, block.box): block for block in blocks}
        found = self._helper.parse_layout_output(answer)
        _, prompts, _, indices = self._helper.prepare_for_extract(page, found)
        for index, prompt in zip(indices, prompts):
            box = tuple(round(1000 * side) for side in found[index].bbox)
            block = by_place[found[index].type, box]
            kind = next(kind for kind, told in self.client.kinds.items() if told["prompt"] == prompt)
            length = self._tokens.table(block.rows) if block.kind == "table" else self._tokens.count(block.text)
            requests.append(Request(kind, min(MOST_TOKENS, length + 1), box))
        return tuple(requests)


def unpack(sources: Path, folder: Path) -> bytes:
    """Writes the PDFs of all packages below ``folder``; the vocabulary. Raises SystemExit where that is in none."""
    vocabulary = None
    for path in sorted(sources.iterdir()):
        for name, content in members(path):
            if name.lower().endswith(".pdf"):
                file = folder / path.name / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            elif name.endswith(VOCABULARY):
                vocabulary = content
    if vocabulary is None:
        raise SystemExit(f"replay_pages: no package in {sources} holds {VOCABULARY}; dashscope does")
    return vocabulary


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """The files in a package that may be of use. Names that lead out of a folder are passed over."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if name.endswith(VOCABULARY):
                    yield name, wheel.read(name)
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as package:
            for member in package:
                inside = not Path(member.name).is_absolute() and ".." not in Path(member.name).parts
                if inside and member.isfile() and member.name.lower().endswith(".pdf"):
                    content = package.extractfile(member)
                    assert content is not None
                    yield member.name, content.read()


def complaint(text: str) -> str | None:
    """What is wrong with a page's text, None where nothing is."""
    shown = [character for character in text if not character.isspace()]
    if len(shown) < LEAST_CHARACTERS:
        return "no text"
    strange = sum(
        not character.isprintable() or "\ue000" <= character <= "\uf8ff" or character == "\ufffd" for character in shown
    )
    words = [word for word in text.split() if any(character.isalpha() for character in word)]
    lonely = sum(len(word) == 1 and word not in "aAI" for word in words)
    if strange > STRANGE * len(shown) or lonely > LONELY * len(words):
        return "garbled"
    return None


def candidates(
    pdf: Path, reader: Reader, seen: set[str], passed: Counter[str]
) -> Iterator[tuple[int, tuple[Request, ...]]]:
    """The pages of a document (from 0) that can be replayed; ``passed`` counts the others by what is wrong."""
    try:
        document = pypdfium2.PdfDocument(pdf)
    except pypdfium2.PdfiumError:
        passed["damaged or encrypted document"] += 1
        return
    for number in range(len(document)):
        try:
            page = document[number]
            text = page.get_textpage().get_text_range()
        except pypdfium2.PdfiumError:
            passed["damaged"] += 1
            continue
        wrong = complaint(text) or ("turned" if page.get_rotation() else "seen before" if text in seen else None)
        if not wrong:
            seen.add(text)
            size = tuple(round(DPI / 72 * side) for side in page.get_size())
            requests = reader.requests(pdf_blocks.blocks(page), Image.new("RGB", size))
            if not 1 < len(requests) <= 1 + MOST_CROPS:
                wrong = "a form"
        if wrong:
            passed[wrong] += 1
        else:
            yield number, requests


def chosen(pages: list, most: int) -> list:
    """At most this many, evenly spaced."""
    return [pages[at * len(pages) // most] for at in range(most)] if len(pages) > most else pages


def told(pages: Sequence[Page]) -> bool:
    """Prints what the pages ask for; whether it is as much as a replay wants."""
    columns = {
        "tokens read": [page.read_tokens for page in pages],
        "tokens of the layout": [page.requests[0].tokens for page in pages],
        "crops": [len(page.requests) - 1 for page in pages],
    }
    for name, values in columns.items():
        mean, p90 = fmean(values), percentile(sorted(values), 0.9)
        print(f"{name:20} a page: mean {mean:7.1f}, median {median(values):6g}, 90 % {p90:5}, most {max(values):5}")
    return fmean(columns["tokens read"]) >= MEAN_TOKENS and fmean(columns["crops"]) >= MEAN_CROPS


def rendered(found: Sequence[tuple[Path, int, Page]]) -> Iterator[tuple[Page, Image.Image]]:
    for pdf, number, page in tqdm(found, "pages"):
        document = open_document(pdf)
        yield page, document.render(number, DPI)
        document.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="a folder of packages")
    parser.add_argument("-o", "--out", type=Path, default=Path("replay.zip"))
    parser.add_argument("--least-tokens", type=int, default=400, help="that are read on a page, or it is left out")
    parser.add_argument("--most-pages", type=int, default=30, help="of one document, evenly spaced")
    arguments = parser.parse_args()
    passed: Counter[str] = Counter()
    found: list[tuple[Path, int, Page]] = []
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(Tokens(unpack(arguments.sources, Path(folder))))
        for pdf in tqdm(sorted(Path(folder).rglob("*.[pP][dD][fF]")), "documents"):
            name = str(pdf.relative_to(folder))
            pages = [
                (pdf, number, Page(f"{name} {number + 1}", requests))
                for number, requests in candidates(pdf, reader, seen, passed)
            ]
            full = [page for page in pages if page[2].read_tokens >= arguments.least_tokens]
            kept = chosen(full, arguments.most_pages)
            passed["too little text"] += len(pages) - len(full)
            passed["enough of the document"] += len(full) - len(kept)
            found += kept
            if kept:
                tqdm.write(f"{len(kept):4} pages of {name}")
        if not found:
            raise SystemExit("replay_pages: none of these packages holds a page that can be replayed")
        replay_set.write(arguments.out, reader.client, rendered(found))
    enough = told([page for _, _, page in found])
    print("passed over:", ", ".join(f"{count} {reason}" for reason, count in passed.most_common() if count))
    print(f"{len(found)} pages, {arguments.out.stat().st_size / 1e6:.1f} MB in {arguments.out}")
    if not enough:
        print(f"a replay wants means of {MEAN_TOKENS} tokens read and {MEAN_CROPS} crops a page", file=sys.stderr)
    return 0 if enough else 1


if __name__ == "__main__":
    raise SystemExit(main())
