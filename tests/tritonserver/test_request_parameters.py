"""What a request's own parameters, beside its inputs, mean: as in Triton's vLLM backend, and never ignored."""

import json
from typing import Any

import numpy as np
import pytest
from fakes.backend import InferenceRequest, Tensor, strings

from tessera.errors import InvalidRequest
from tessera.tritonserver import tensors
from tessera.tritonserver.failures import LONGEST, deadline_ns

pytestmark = pytest.mark.usefixtures("backend")


def request(parameters: dict[str, Any] | str, sampling: dict[str, Any] | None = None, *inputs: Tensor) -> Any:
    text = parameters if isinstance(parameters, str) else json.dumps(parameters)
    given = [] if sampling is None else [strings("sampling_parameters", json.dumps(sampling).encode())]
    return InferenceRequest([*given, *inputs], parameters=text)


def sampling(given: Any) -> dict[str, Any]:
    return tensors.sampling(given, "sampling_parameters")


GIVEN = {"max_tokens": 2, "temperature": 0.5, "ignore_eos": True, "stop": "end", "top_k": "7"}
FORWARDED = ("headers", "traceparent", "x-request-id")


@pytest.mark.parametrize(
    ("parameters", "merged"),
    [
        (GIVEN, {**GIVEN, "seed": 3}),
        ("", {"seed": 3}),
        ('{"stream": true}', {"seed": 3}),
        ({"seed": 3, "timeout": 900}, {"seed": 3, "timeout_us": 900}),  # the server did not take it for itself
        (dict.fromkeys(FORWARDED, 5), {"seed": 3}),
    ],
)
def test_parameters_are_sampling_parameters_beside_the_inputs(
    parameters: dict[str, Any] | str, merged: dict[str, Any]
) -> None:
    assert sampling(request(parameters, {"seed": 3})) == merged
    assert {**sampling(request(parameters)), "seed": 3} == merged


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'max_tokens' is given twice: 3 and, as a request parameter, 2"):
        sampling(request({"max_tokens": 2}, {"max_tokens": 3}))
    with pytest.raises(InvalidRequest, match="'top_k' is given twice: 1 and, as a request parameter, 2"):
        sampling(request('{"top_k": 1, "top_k": 2}'))
    with pytest.raises(InvalidRequest, match="'timeout_us' is given twice"):
        sampling(request({"timeout": 2}, {"timeout_us": 3}))


@pytest.mark.parametrize(
    ("of_request", "of_sampling", "microseconds"),
    [(900, 20, 20), (20, 900, 20), (900, 0, 900), (0, 900, 900), (2**63 - 1, 0, LONGEST)],
)
def test_of_two_limits_of_time_the_shorter_counts(of_request: int, of_sampling: int, microseconds: int) -> None:
    given = InferenceRequest([], timeout=of_request)
    assert deadline_ns(given, {"timeout_us": of_sampling}, 5) == 5 + 1000 * microseconds
    assert deadline_ns(InferenceRequest([]), {}, 5) == 0


@pytest.mark.parametrize("name", tensors.FLAGS)
def test_flags(name: str) -> None:
    tensor = Tensor(name, np.array([True]))
    assert tensors.flag(request({}), name, True) and not tensors.flag(request({}), name, False)
    for value in (True, "true", "True"):
        assert tensors.flag(request({name: value}), name, False)
        assert tensors.flag(request({name: value}, None, tensor), name, False)
    assert not tensors.flag(request({name: False}), name, True)
    with pytest.raises(InvalidRequest, match=f"'{name}' is given twice: True and, as a request parameter, False"):
        tensors.flag(request({name: False}, None, tensor), name, True)
    for value in (2, "yes", 0.5):
        with pytest.raises(InvalidRequest, match=f"'{name}' must be true or false"):
            tensors.flag(request({name: value}), name, True)
