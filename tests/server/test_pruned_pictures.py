"""Pictures without their equal groups of patches, of the default document model, through the real server."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.test_pruning import EQUAL, file, greedy, theirs
from PIL import Image, ImageDraw, ImageFont
from tiny_qwen2_vl import QWEN2_VL
from toy_servers import Launched
from transformers import Qwen2VLForConditionalGeneration

from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera_client import Answer, Client
from tessera_command.cli import main

pytestmark = pytest.mark.server

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "document_model" / "checkpoint"
TOKENS = 16
MARKS = itertools.count()


def lines() -> np.ndarray:
    """Letters on white, 336 x 168."""
    picture = Image.new("RGB", (336, 168), "white")
    for number, line in enumerate(("The house was built", "in the spring")):
        ImageDraw.Draw(picture).text((10, 20 + 80 * number), line, "black", ImageFont.load_default(28))
    return np.asarray(picture)


def chat(picture: bytes) -> list[dict[str, Any]]:
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "\nText Recognition:"}]
    return [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": content}]


def asked(client: Client, pixels: np.ndarray, policy: Any, **options: Any) -> Answer:
    """Each time by other bytes, so that no cache answers."""
    picture = file(pixels) + b"%d" % next(MARKS)
    return client.chat(chat(picture), tile_policy=policy, **({"max_tokens": TOKENS, "logprobs": 2} | options))


def told(answer: Answer) -> tuple[Any, ...]:
    """All that the model says, to the bit."""
    return answer.text, answer.logprobs, answer.choices, answer.usage


def test_the_answer_is_that_of_transformers_on_the_rows_that_are_left(documents: Launched) -> None:
    preprocess = Preprocessor.from_checkpoint(CHECKPOINT)
    shown = [file(lines())]
    turns = chat(shown[0])
    turns[1]["content"][0] = {"type": "image"}
    whole, pruned = (
        preprocess(PreprocessRequest(messages=turns, images=shown, tile_policy=policy)) for policy in ({}, EQUAL)
    )
    model = Qwen2VLForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    expected = greedy(model, pruned, theirs(model, QWEN2_VL, whole, pruned), TOKENS)
    for url in (documents.url("grpc"), "http://" + documents.url("http")):
        with Client(url) as client:
            full, found = (asked(client, lines(), policy, ignore_eos=True) for policy in ({}, EQUAL))
            assert [entry["token_id"] for entry in found.logprobs] == [int(step.argmax()) for step in expected]
            values_told = [entry["logprob"] for entry in found.logprobs]
            assert values_told == pytest.approx([float(step.max()) for step in expected], abs=1e-3)
            assert full.usage.image_tokens == whole.plans[0].tokens > found.usage.image_tokens
            assert found.usage.image_tokens == pruned.plans[0].tokens
            assert found.usage.prompt_tokens == len(pruned.input_ids)
            assert [entry["logprob"] for entry in full.logprobs] != values_told


def test_without_equal_groups_it_is_that_of_the_whole_picture(documents: Launched) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (140, 196, 3), np.uint8)
    with Client(documents.url("grpc")) as client:
        expected, found = (asked(client, noise, policy) for policy in ({}, EQUAL))
        assert told(found) == told(expected)


def test_a_cascade_from_it_to_the_whole_picture(documents: Launched) -> None:
    labels = {"choices": ["The", "house", "spring"], "max_tokens": None, "logprobs": None}
    with Client(documents.url("grpc")) as client:
        whole, pruned = (asked(client, lines(), policy, **labels) for policy in ({}, EQUAL))
        assert told(whole) != told(pruned)
        for margin, expected in ((0, pruned), ("inf", whole)):
            found = asked(client, lines(), {"cascade": {"first": EQUAL, "margin": margin}}, **labels)
            assert told(found) == told(expected) and found.cascade.escalated == (margin == "inf")


def test_it_may_be_planned(documents: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a cascade, which may go on to the whole picture, and, for answers too long for one, as it is."""
    noise = np.random.default_rng(0).integers(0, 256, (2, 140, 196, 3), np.uint8)
    for name, pixels in (("a.png", noise[0]), ("b.png", noise[1]), ("c.png", lines())):
        (tmp_path / name).write_bytes(file(pixels))
    (tmp_path / "labels.csv").write_text("file,question\na.png,?\nb.png,?\nc.png,?\n")
    asked = ["plan", str(tmp_path), "--url", documents.url("grpc"), "--first", "prune=equal", "--disagree", "60%"]
    asked += ["--confidence", "40%"]
    assert main([*asked, "--max-tokens", "40"]) == 0
    said = capsys.readouterr()
    policy = json.loads(said.out)
    assert policy["tile_policy"] == EQUAL and "watch" not in policy and "the first cut for all" in said.err
    evidence = policy["evidence"]
    assert (evidence["pictures"], evidence["escalated"]) == (3, 0) and evidence["differ"] <= 1
    assert evidence["tokens"]["cascade"] < evidence["tokens"]["full"]
    assert main([*asked, "--max-tokens", "4"]) == 0
    policy = json.loads(capsys.readouterr().out)
    assert policy["tile_policy"]["cascade"]["first"] == EQUAL and policy["watch"]
    assert main([*asked, "--max-tokens", "40", "--each-question"]) == 2
    assert "answers of more than 16 tokens have no margin" in capsys.readouterr().err
