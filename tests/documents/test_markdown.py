"""What a page's blocks become in Markdown."""

from __future__ import annotations

from typing import Any

from tessera_documents.results import markdown


def block(kind: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"type": kind, "bbox": [0, 0, 1, 1], "angle": 0, "content": content, **more}


def test_every_kind_of_block() -> None:
    blocks = [
        block("header", "Annual report"),
        block("doc_title", "A report\nof things"),
        block("paragraph_title", r"On \( x^2 \)"),
        block("text", r"Let \(a\) be \( b \) or \\\\( c"),
        block("text", "and so on", merge_prev=True),
        block("equation", "\\[\na \\\\[2pt] b\n\\]"),
        block("table", r"<table><tr><td>\(1\)</td></tr></table>"),
        block("code", "x = 1\ny = 2"),
        block("image", None, picture="page-0001-9.jpg"),
        block("chart", "rising", picture="page-0001-10.jpg"),
        block("list", None),
        block("page_number", "7"),
    ]
    assert markdown(blocks).split("\n\n") == [
        "# A report of things",
        "## On $x^2$",
        r"Let $a$ be $b$ or \\\\( c and so on",
        "$$\na \\\\[2pt] b\n$$",
        r"<table><tr><td>\(1\)</td></tr></table>",
        "```\nx = 1\ny = 2\n```",
        "![image](page-0001-9.jpg)",
        "![chart](page-0001-10.jpg)",
        "rising\n",
    ]


def test_a_page_with_nothing_on_it() -> None:
    assert markdown([]) == "\n"
