"""What the demo of documents says of a page: errors in its text, blocks in their place."""

from typing import Any

import demo_documents
import pytest
from demo_documents import Score, cer, layout_f1, score

TRUTH: list[dict[str, Any]] = [
    {"type": "title", "box": [100, 50, 900, 100], "content": "On Rain"},
    {"type": "text", "box": [100, 150, 900, 400], "content": "It falls."},
    {"type": "table", "box": [100, 450, 900, 600], "content": "<fcel>1<nl>"},
    {"type": "image", "box": [100, 650, 900, 900], "content": ""},
]


def parsed(**contents: str) -> list[dict[str, Any]]:
    """As tessera parse writes what truly stands there, but for the contents given."""
    own = {block["type"]: block["content"] for block in TRUTH} | {"table": "<table></table>", "image": None} | contents
    return [{"type": b["type"], "bbox": [side / 1000 for side in b["box"]], "content": own[b["type"]]} for b in TRUTH]


def test_a_page_that_was_read_well() -> None:
    assert score(TRUTH, parsed()) == Score(len("On Rain\nIt falls."), 0, 4, 8)


def test_wrong_letters_lost_blocks_and_their_order_are_errors() -> None:
    assert score(TRUTH, parsed(text="It fell.")).edits == 2
    assert score(TRUTH, parsed()[1:]) == Score(17, len("On Rain\n"), 3, 7)
    assert score(TRUTH, list(reversed(parsed()))).edits > 10
    moved = parsed()
    moved[0]["bbox"] = [0.1, 0.0, 0.9, 0.07]  # overlaps by less than half
    moved[1]["type"] = "list_item"
    assert score(TRUTH, moved) == Score(17, 0, 2, 8)


def test_what_mineru_renames_is_found_under_its_new_name() -> None:
    listed = [{**TRUTH[1], "type": "list_item"}]
    assert score(listed, parsed()[1:2]).hits == 1 and score(listed, parsed()[:1]).hits == 0


def test_pages_count_by_their_characters_and_blocks() -> None:
    pages = [Score(10, 1, 4, 8), Score(30, 1, 1, 4)]
    assert cer(pages) == pytest.approx(0.05) and layout_f1(pages) == pytest.approx(10 / 12)


@pytest.mark.parametrize(
    ("pages", "code"), [([Score(100, 5, 19, 40)], 0), ([Score(100, 6, 20, 40)], 1), ([Score(100, 0, 18, 40)], 1)]
)
def test_the_exit_code_says_whether_that_was_well_enough(
    monkeypatch, capsys, tmp_path, pages: list[Score], code: int
) -> None:
    monkeypatch.setattr(demo_documents, "parsed", lambda out, arguments: pages)
    bars = ["--cer", "0.05", "--layout-f1", "0.95"]
    assert demo_documents.main(["--checkpoint", str(tmp_path), *bars]) == code
    assert demo_documents.main(["--checkpoint", str(tmp_path)]) == 0
    assert '"docs.parse_cer"' in capsys.readouterr().out
