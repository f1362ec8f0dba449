"""Families that no checkpoint of ours has, served as a user serves them and asked: random weights answer as
transformers' model of them does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_qwen2_vl import LEAST, MOST, QWEN2_5_VL, Kind, picture, reference_processor, write_model
from toy_servers import REPOSITORY, Launched

from tessera_client import Client

TOKENS = 8
PICTURES = [picture(140, 168, 1), picture(56, 84, 2), picture(112, 196, 3)]


@pytest.mark.server
@pytest.mark.parametrize("kind", [QWEN2_5_VL], ids=str)
def test_answers_about_some_pictures_are_those_of_transformers(tmp_path: Path, kind: Kind) -> None:
    folder = tmp_path / "checkpoint"
    model = write_model(folder, kind=kind, min_pixels=LEAST, max_pixels=MOST)
    theirs = reference_processor(folder, LEAST, MOST, kind)
    with (
        Launched(REPOSITORY, tmp_path / "log", "--checkpoint", str(folder)) as running,
        Client(running.url("grpc")) as client,
    ):
        for shown in ([0], [1], [2, 0, 1], []):
            parts = [{"type": "text", "text": "See "}, *[{"type": "image"}] * len(shown)]
            turn = {"role": "user", "content": [*parts, {"type": "text", "text": " now?"}]}
            prompt = theirs.apply_chat_template([turn], add_generation_prompt=True)
            given = theirs(images=[PICTURES[index][1] for index in shown] or None, text=prompt, return_tensors="pt")
            with torch.inference_mode():
                ids = model.generate(**given, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
            question, pictures = f"See {'<image>' * len(shown)} now?", [PICTURES[index][0] for index in shown] or None
            answer = client.ask(pictures, question, max_tokens=TOKENS, ignore_eos=True)
            length = given["input_ids"].shape[1]
            assert answer.usage.prompt_tokens == length
            assert answer.text == theirs.tokenizer.decode(ids[0, length:], skip_special_tokens=True)
