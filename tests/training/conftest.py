"""A document model with random weights, and crops of a page."""

import pytest
import torch
from checkpoints import DOCUMENTS, fresh_model
from document_samples import Sample
from evaluate import page_samples
from transformers import Qwen2VLForConditionalGeneration


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Qwen2VLForConditionalGeneration:
    """With weights large enough that answers differ by what is seen."""
    model = fresh_model(DOCUMENTS, 1).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" not in name and "ln_q" not in name:
            parameter.data.normal_(0, 0.08, generator=generator)
    return model


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Crops of one held-out page, the smallest first."""
    found = page_samples(0)[1:]
    return sorted(found, key=lambda sample: len(sample.patches))
