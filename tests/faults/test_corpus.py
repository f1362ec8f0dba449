"""Thousands of bad requests through the stages' own code, in this process: an answer or a clear refusal, quickly."""

import json
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fakes.backend import InferenceRequest, Tensor, stage_args, strings
from faults.asking import complaint
from faults.badinputs import Inputs, mutants, named_faults, odd_but_good
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.errors import InvalidRequest
from tessera.tritonserver import language_model
from tessera.tritonserver.preprocess import TritonPythonModel

pytestmark = pytest.mark.faults

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"
# Enough for every mutation of a size to be tried on both sides of the limit without decoding for minutes.
MAX_PIXELS = 4_000_000
SECONDS = 1.0
# The memory that one part of the corpus may add at its peak.
GROWTH_KIB = 256 << 10
fixed = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def stage() -> TritonPythonModel:
    limits = {"max_file_pixels": str(MAX_PIXELS), "max_request_bytes": str(64 << 20)}
    stage = TritonPythonModel()
    stage.initialize(stage_args("preprocess", checkpoint=str(CHECKPOINT), **limits))
    return stage


def answer(stage: TritonPythonModel, tensors: dict[str, tuple[bytes, ...]]) -> str | None:
    """The refusal's words, or None where the request goes on to the engine; fails where the answer is no good."""
    started = time.process_time()
    refusal = _answer(stage, [strings(name, *items) for name, items in tensors.items()])
    assert time.process_time() - started < SECONDS
    if refusal is not None:
        assert complaint(refusal) is None, complaint(refusal)
    return refusal


def _answer(stage: TritonPythonModel, tensors: list[Tensor]) -> str | None:
    (response,) = stage.execute([InferenceRequest(tensors)])
    if response.has_error():
        assert response.error().code() == "INVALID_ARG", response.error().message()
        return response.error().message().removeprefix("INVALID_ARGUMENT: ")
    # What the language model then reads; the vision encoder takes the pixels as they are.
    kept = [tensor for tensor in response.output_tensors() if tensor.name() in ("INPUT_IDS", "SPANS", "DIGEST")]
    kept += [tensor for tensor in tensors if tensor.name() in ("text_input", "sampling_parameters")]
    try:
        language_model.read_request(InferenceRequest(kept), stream=True, deadline_ns=None)
    except InvalidRequest as error:
        return str(error)
    return None


@pytest.mark.parametrize("part", range(2))
def test_mutants_are_answered_or_refused(backend: Any, stage: TritonPythonModel, part: int) -> None:
    """600 a part."""
    answer(stage, odd_but_good()["jpeg"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: Counter[tuple[str, bool]] = Counter()
    for inputs in mutants(seed=3, count=600, start=600 * part):
        print(inputs.name)  # pytest shows the last one if it fails
        found[inputs.name.split()[0], answer(stage, inputs.tensors) is None] += 1
    assert not backend.logged
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH_KIB
    for kind in ("picture", "messages", "sampling", "prompt"):
        assert found[kind, True] and found[kind, False], f"{kind}: {found}"


@pytest.mark.parametrize("name", list(named_faults()))
def test_named_faults_are_named(backend: Any, stage: TritonPythonModel, name: str) -> None:
    tensors, words = named_faults()[name]
    refusal = answer(stage, tensors)
    assert refusal is not None and words in refusal


def test_what_an_answer_must_match_is_read_before_the_picture_and_compiled_by_the_engine_alone(
    backend: Any, stage: TritonPythonModel
) -> None:
    def asked(schema: Any, *pictures: bytes) -> str | None:
        sampling = json.dumps({"json_schema": schema}).encode()
        return answer(stage, {"text_input": (b"Which?",), "sampling_parameters": (sampling,), "image": pictures})

    assert "keyword 'if' is not supported" in (asked({"if": {}}, b"no picture") or "")
    factors = (2, 3, 5, 7, 11, 13, 17, 19, 23)  # compiling takes minutes
    assert asked({"allOf": [{"type": "integer", "multipleOf": n} for n in factors]}) is None


@pytest.mark.parametrize("name", list(odd_but_good()))
def test_odd_requests_are_answered(backend: Any, stage: TritonPythonModel, name: str) -> None:
    assert answer(stage, odd_but_good()[name]) is None


def test_an_input_is_made_again_from_its_seed_and_kept_as_text() -> None:
    first, second = (list(mutants(5, 30)) for _ in range(2))
    assert first == second
    assert first[7:9] == list(mutants(5, 2, start=7))
    assert list(mutants(6, 30)) != first
    assert [Inputs.from_json(inputs.to_json()) for inputs in first] == first


@fixed
@given(st.text(st.characters(codec="utf-8"), max_size=200))
def test_any_text_without_markers_is_a_prompt(backend: Any, stage: TritonPythonModel, text: str) -> None:
    text = text.replace("<image>", "") + "?"
    assert answer(stage, {"text_input": (text.encode(),)}) is None


INPUTS = st.sampled_from(["text_input", "messages", "image", "sampling_parameters"])


@fixed
@given(st.dictionaries(INPUTS, st.lists(st.binary(max_size=60), max_size=3).map(tuple)))
def test_any_bytes_in_any_input(backend: Any, stage: TritonPythonModel, tensors: dict[str, tuple[bytes, ...]]) -> None:
    answer(stage, tensors)


def test_a_bad_request_leaves_the_others_of_its_batch_alone(backend: Any, stage: TritonPythonModel) -> None:
    good = [strings(name, *items) for name, items in odd_but_good()["jpeg"].items()]
    (alone,) = stage.execute([InferenceRequest(good)])
    bad = [InferenceRequest([strings(n, *i) for n, i in tensors.items()]) for tensors, _ in named_faults().values()]
    among = stage.execute([request for each in bad[:20] for request in (each, InferenceRequest(good))])
    for refused, answered in zip(among[::2], among[1::2]):
        assert refused.has_error()
        for mine, theirs in zip(answered.output_tensors(), alone.output_tensors(), strict=True):
            assert mine.name() == "STAMPS" or (mine.as_numpy() == theirs.as_numpy()).all()
