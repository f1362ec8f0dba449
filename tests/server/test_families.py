"""Families that no checkpoint of ours has, served as a user serves them and asked: random weights answer as
transformers' model of them does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen3_vl
import torch
from tiny_qwen2_vl import LEAST, MOST, QWEN2_5_VL, picture, reference_processor, write_model
from toy_servers import REPOSITORY, Launched

from tessera_client import Client

TOKENS = 8
# What writes a checkpoint, its processor, and pictures that keep their size.
FAMILIES: dict[str, tuple[Any, Any, list[tuple[int, int]]]] = {
    "qwen2_5_vl": (
        partial(write_model, kind=QWEN2_5_VL, min_pixels=LEAST, max_pixels=MOST),
        partial(reference_processor, kind=QWEN2_5_VL),
        [(140, 168), (56, 84), (112, 196)],
    ),
    "qwen3_vl": (
        partial(tiny_qwen3_vl.write_model, size={"shortest_edge": LEAST, "longest_edge": MOST}),
        tiny_qwen3_vl.reference_processor,
        [(128, 160), (64, 96), (96, 192)],
    ),
}
IN_PARTS = ("--set", "language_model.max_batched_tokens=16", "--set", "language_model.max_sequences=8")


@pytest.mark.server
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_about_some_pictures_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder, (write, processor, sizes) = tmp_path / "checkpoint", FAMILIES[family]
    model, theirs, pictures = write(folder), processor(folder, LEAST, MOST), [picture(*size, 1) for size in sizes]
    with (
        Launched(REPOSITORY, tmp_path / "log", "--checkpoint", str(folder), *IN_PARTS) as running,
        Client(running.url("grpc")) as client,
    ):
        for shown in ([0], [1], [2, 0, 1], []):
            parts = [{"type": "text", "text": "See "}, *[{"type": "image"}] * len(shown)]
            turn = {"role": "user", "content": [*parts, {"type": "text", "text": " now?"}]}
            prompt = theirs.apply_chat_template([turn], add_generation_prompt=True)
            given = theirs(images=[pictures[index][1] for index in shown] or None, text=prompt, return_tensors="pt")
            with torch.inference_mode():
                ids = model.generate(**given, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
            question, files = f"See {'<image>' * len(shown)} now?", [pictures[index][0] for index in shown] or None
            answer = client.ask(files, question, max_tokens=TOKENS, ignore_eos=True)
            length = given["input_ids"].shape[1]
            assert answer.usage.prompt_tokens == length
            assert answer.text == theirs.tokenizer.decode(ids[0, length:], skip_special_tokens=True)
