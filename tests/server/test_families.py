"""Families that no checkpoint of ours has, served as a user serves them and asked: random weights answer as
transformers' model of them does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny_families import NEW
from tiny_qwen2_vl import picture
from toy_servers import REPOSITORY, Launched

from tessera_client import Client

TOKENS = 8
AS_THEIRS = ("--set", "dtype=float32")
IN_PARTS = ("--set", "language_model.max_batched_tokens=16", "--set", "language_model.max_sequences=8")
#: of chats the turns, a user's first; a number is a picture's
CHATS: tuple[tuple[list[str | int], ...], ...] = (
    (["See ", 0, " now?"],),
    (["See ", 2, " and ", 0, ": alike?"], ["A socket."], [1, " Now?"]),
    (["See now?"],),
)


@pytest.mark.server
@pytest.mark.parametrize("family", NEW)
def test_answers_about_some_pictures_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder, tiny = tmp_path / "checkpoint", NEW[family]
    model, theirs, pictures = tiny.write(folder), tiny.processor(folder), [picture(*size, 1) for size in tiny.pictures]
    with (
        Launched(REPOSITORY, tmp_path / "log", "--checkpoint", str(folder), *AS_THEIRS, *IN_PARTS) as running,
        Client(running.url("grpc")) as client,
    ):
        answers = set()
        for turns in CHATS:
            messages: list[dict[str, Any]] = [
                {"role": ("user", "assistant")[number % 2], "content": [*map(part, turn)]}
                for number, turn in enumerate(turns)
            ]
            shown = [pictures[index] for turn in turns for index in turn if isinstance(index, int)]
            prompt = theirs.apply_chat_template(messages, add_generation_prompt=True)
            given = theirs(images=[image for _, image in shown] or None, text=prompt, return_tensors="pt")
            with torch.inference_mode():
                ids = model.generate(**given, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
            files = [data for data, _ in shown] or None
            answer = client.chat(messages, files, max_tokens=TOKENS, ignore_eos=True)
            length = given["input_ids"].shape[1]
            assert answer.usage.prompt_tokens == length
            assert answer.text == theirs.tokenizer.decode(ids[0, length:], skip_special_tokens=True)
            answers.add(answer.text)
        assert len(answers) == len(CHATS)


def part(text_or_picture: str | int) -> dict[str, str]:
    if isinstance(text_or_picture, int):
        return {"type": "image"}
    return {"type": "text", "text": text_or_picture}
