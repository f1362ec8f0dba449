"""Rendered pages: the same from the same seed, boxes around their ink, answers that MinerU's own client understands."""

import io
import json
from pathlib import Path

import numpy as np
import pypdfium2
import pytest
from demo_documents import write_pages
from document_samples import block_sample, cut, glyph_targets, layout_answer, patched
from document_tokens import CELLS, ChatTokens
from mineru_vl_utils.mineru_client import MinerUClient
from mineru_vl_utils.post_process.otsl2html import convert_otsl_to_html
from mineru_vl_utils.structs import ContentBlock
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import pages
from pages.composition import INK, Composer
from pages.scanning import turned
from pages.words import ALPHABET

COUNT = 10


@pytest.fixture(scope="module")
def clean() -> list[pages.Page]:
    """Without what a scanner does."""
    return [Composer(pages.Random(f"clean/{seed}")).page() for seed in range(COUNT)]


@pytest.fixture(scope="module")
def found() -> list[pages.Page]:
    return [pages.sample(seed) for seed in range(COUNT)]


@pytest.fixture(scope="module")
def helper():
    client = MinerUClient(
        "http-client", model_name="any", server_url="http://localhost:1", skip_model_name_checking=True
    )
    return client.helper


def test_a_seed_makes_the_same_page_again(found: list[pages.Page]) -> None:
    again = pages.sample(3)
    assert np.array_equal(again.picture, found[3].picture)
    assert layout_answer(again) == layout_answer(found[3])
    assert [block.answer for block in again.blocks] == [block.answer for block in found[3].blocks]


def test_held_out_pages_are_others() -> None:
    held_out, train = pages.sample(3, "heldout"), pages.sample(3)
    assert {b.answer for b in held_out.blocks if len(b.answer) > 20}.isdisjoint({b.answer for b in train.blocks})


def test_all_ink_is_in_boxes_and_no_box_is_larger_than_its_ink(clean: list[pages.Page]) -> None:
    for page in clean:
        outside = page.picture < INK
        for block in page.blocks:
            left, top, right, bottom = map(int, block.box)
            ink = page.picture[top:bottom, left:right] < INK
            assert ink[:4].any() and ink[-4:].any() and ink[:, :4].any() and ink[:, -4:].any(), block.kind
            outside[top - 1 : bottom + 2, left - 1 : right + 2] = False
        assert not outside.any()


def test_boxes_follow_a_turned_page() -> None:
    page = turned(Composer(pages.Random("turned")).page(), 0.5)
    outside = page.picture < INK
    for block in page.blocks:
        left, top, right, bottom = map(int, block.box)
        outside[max(0, top - 2) : bottom + 3, max(0, left - 2) : right + 3] = False
    assert not outside.any()


def test_glyphs_lie_on_ink(clean: list[pages.Page]) -> None:
    """Nearly all: the middle of some letters is hollow, so a square around it is looked at."""
    for page in clean:
        places = np.concatenate([block.places for block in page.blocks]).astype(int)
        inked = [(page.picture[y - 7 : y + 8, x - 5 : x + 6] < INK).any() for x, y in places]
        assert np.mean(inked) > 0.95


def test_minerus_parser_reads_the_layout(found: list[pages.Page], helper) -> None:
    for page in found:
        blocks = helper.parse_layout_output(layout_answer(page))
        assert [block.type for block in blocks] == [block.kind for block in page.blocks]
        for block, own in zip(blocks, page.blocks, strict=True):
            assert block.angle == 0
            assert block.bbox == [side / 1000 for side in pages.thousandths(own.box, page)]


def test_crops_are_those_of_minerus_client(found: list[pages.Page], helper) -> None:
    tokens, processor = ChatTokens(), Qwen2VLImageProcessorPil(min_pixels=4 * 784, max_pixels=2048 * 784)
    for page in found[:3]:
        blocks = helper.parse_layout_output(layout_answer(page))
        # The client masks tables its own way, in colour; that path is passed over.
        theirs, _, _, indices = helper.prepare_for_extract(Image.fromarray(page.picture), blocks, ["table"])
        picture = Image.fromarray(page.picture)
        compared = 0
        for data, index in zip(theirs, indices, strict=True):
            grid = processor([Image.open(io.BytesIO(data))], return_tensors="np")
            own = block_sample(page, picture, page.blocks[index], tokens, None)
            values = grid["pixel_values"].reshape(-1, 3, 2, 196)[:, 0, 0] * 0.26862954 + 0.48145466
            assert values.shape == own.patches.shape
            assert np.abs(values * 255 - own.patches).max() < 1.01
            compared += 1
        assert compared == len([b for b in pages.read_blocks(page) if b.kind != "table"])


def test_tables_become_html(found: list[pages.Page]) -> None:
    tables = [block.answer for page in found for block in page.blocks if block.kind == "table"]
    assert len(tables) >= 3
    for otsl in tables:
        rows = otsl.split("<nl>")[:-1]
        assert len({sum(row.count(cell) for cell in CELLS) for row in rows}) == 1, "rows are equally long"
        assert convert_otsl_to_html(otsl).count("<tr>") == len(rows)


def test_formulas_pass_minerus_post_processing_unchanged(found: list[pages.Page], helper) -> None:
    formulas = [block.answer for page in found for block in page.blocks if block.kind == "equation"]
    assert len(formulas) >= 3
    for latex in formulas:
        (block,) = helper.post_process([ContentBlock("equation", [0.0, 0.0, 1.0, 1.0], 0, latex)])
        assert block.content == f"\\[\n{latex}\n\\]"


def test_a_written_pdf_has_the_pages_as_they_were_drawn(tmp_path: Path) -> None:
    """Scans as JPEG files: grey levels may be a little off."""
    write_pages(tmp_path, 2, first=5)
    told, document = json.loads((tmp_path / "truth.json").read_text()), pypdfium2.PdfDocument(tmp_path / "pages.pdf")
    assert len(document) == len(told) == 2
    for index in range(2):
        page = pages.sample(5 + index, "heldout")
        shown = document[index].render(scale=200 / 72, grayscale=True).to_pil().resize(page.picture.shape[::-1])
        assert np.abs(np.asarray(shown, int) - page.picture).mean() < 4
        assert [block["content"] for block in told[index]] == [block.answer for block in page.blocks]


def test_the_whole_alphabet_there_and_back() -> None:
    tokenizer = ChatTokens().tokenizer
    for character in ALPHABET:
        assert len(tokenizer.encode(character).ids) == 1
    text = ALPHABET + 'Zwölf "東京" \n\t🙂<fcel>a<nl>' + ALPHABET[::-1]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text
    layout = "<|box_start|>001 002 003 004<|box_end|><|ref_start|>text<|ref_end|><|rotate_up|>"
    assert tokenizer.decode(tokenizer.encode(layout).ids, skip_special_tokens=False) == layout


def test_targets_of_glyphs_point_at_their_patches(found: list[pages.Page]) -> None:
    """Where two glyphs share a patch one of them is lost; few do."""
    tokens, page = ChatTokens(), found[1]
    block = max((b for b in page.blocks if b.kind == "text"), key=lambda b: len(b.answer))
    prepared = cut(Image.fromarray(page.picture), block.box)
    _, places = patched(prepared.picture)
    targets, *last_two = glyph_targets(block, prepared, tokens)[tuple(places.T)].T
    last_two = np.stack(last_two, 1)
    marked = np.flatnonzero(targets)
    assert 0.6 * len(block.glyphs) < len(marked) <= len(block.glyphs)
    order = np.lexsort((places[marked][:, 1], places[marked][:, 0]))
    read = tokens.decode(targets[marked[order]][:20])
    expected = iter(block.answer.replace(" ", ""))
    assert all(character in expected for character in read), (read, block.answer)
    for place in marked:
        one, two = last_two[place]
        if one and two:
            assert tokens.decode([two, one, targets[place]]) in block.glyphs
    assert (last_two[targets == 0] == 0).all() and np.count_nonzero(last_two[marked]) > len(marked)
