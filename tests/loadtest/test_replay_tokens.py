"""Tokens are counted as a byte-level BPE of Qwen's kind cuts them, and as MinerU's grammar spends them."""

from __future__ import annotations

import base64

from bench.replay_tokens import Tokens

WORDS = ["he", "ll", "hell", "hello", " w", "or", "ld", " wor", " world", "te", "xt", "text", "ta", "bl", "ble"]


def tokens() -> Tokens:
    known = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    return Tokens(b"\n".join(base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(known)) + b"\n")


def test_pieces_are_merged_by_rank():
    counted = {text: tokens().count(text) for text in ("", "hello world", "hello", "help", "2024", "é", "don't")}
    # " world" by " w", "or", " wor", "ld"; every digit by itself; é has two bytes; don, 't apart
    assert counted == {"": 0, "hello world": 2, "hello": 1, "help": 3, "2024": 4, "é": 2, "don't": 5}


def test_a_layout_of_two_boxes():
    boxes = [("text", (1, 20, 300, 999)), ("table", (100, 200, 300, 400))]
    box = 5 + 12 + 3  # special tokens, digits, spaces
    assert tokens().layout(boxes) == (box + 1) + 1 + (box + 2)  # text, end of line, ta ble


def test_a_table_spends_a_token_for_each_cell_and_row():
    assert tokens().table([("hello", "1"), ("", "22")]) == (1 + 1 + 1 + 1 + 1) + (1 + 1 + 2 + 1)
