"""`document_parity` compares what it says: our stages' answers, under every penalty, with generated ones."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.document_parity import Asked, Theirs, batches
from bench.parity import Ours
from checkpoints import DOCUMENTS, fresh_model, save_model
from document_tokens import PROMPTS, SYSTEM
from PIL import Image

from tessera.preprocess.preprocessor import PreprocessRequest
from tessera.prompt.sampling import SamplingParameters

LENGTH = 40
PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.0, "frequency_penalty": 0.05, "no_repeat_ngram_size": 100},
    {"presence_penalty": 0.0, "frequency_penalty": 0.0, "no_repeat_ngram_size": 3},
    {"presence_penalty": 0.0, "frequency_penalty": 0.6},
    {},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights large enough that answers differ by what is seen."""
    folder, model = tmp_path_factory.mktemp("documents"), fresh_model(DOCUMENTS, 1)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" not in name and "ln_q" not in name:
            parameter.data.normal_(0, 0.08, generator=generator)
    save_model(folder, DOCUMENTS, model.state_dict())
    return folder


@pytest.fixture(scope="module")
def asked(folder: Path) -> list[Asked]:
    """Pictures of several sizes, answered by the server's stages in this process, each in a step of its own."""
    ours, found = Ours.load(folder), []
    for page, (penalties, size) in enumerate(zip(PENALTIES, ((200, 60), (84, 84), (57, 140), (300, 30)))):
        noise, stream = np.random.default_rng(page).integers(0, 255, (*size, 3), np.uint8), io.BytesIO()
        Image.fromarray(noise).save(stream, "PNG")
        system, text = {"role": "system", "content": SYSTEM}, {"type": "text", "text": PROMPTS["text"]}
        sent = [system, {"role": "user", "content": [{"type": "image"}, text]}]
        asked = PreprocessRequest(messages=sent, images=[stream.getvalue()])
        _, tokens = ours.tokens(asked, SamplingParameters(max_tokens=LENGTH, **penalties))
        content = [{"type": "image", "image": stream.getvalue()}, text]
        options = {"max_tokens": LENGTH} | penalties
        found.append(Asked(page, [system, {"role": "user", "content": content}], options, tokens))
    return found


def test_our_answers_are_those_that_transformers_generates(folder: Path, asked: list[Asked]) -> None:
    assert len({tuple(each.tokens) for each in asked}) == len(asked) and max(len(each.tokens) for each in asked) > 9
    theirs = Theirs(folder)
    assert [found for batch in batches(asked) for found in theirs.differences(batch)] == [None] * len(asked)
    # The penalties count: without them the answers are others.
    bare = [each._replace(options={"max_tokens": LENGTH}) for each in asked]
    assert [bool(found) for found in theirs.differences(bare)] == [True, True, True, False]
