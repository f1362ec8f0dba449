"""A real server asked over HTTP: requests, and its metrics page."""

import base64
import json
import urllib.error
import urllib.request
from typing import Any

QUESTION = "Is there an exposed wire?"


def post(url: str, body: object = None) -> tuple[int, str]:
    """Status and body of the answer to this JSON, or to a GET."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def read(url: str) -> dict[str, float]:
    """Every sample of the metrics page: name with labels -> value."""
    lines = post(url)[1].splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def total(samples: dict[str, float], family: str) -> float:
    """The sum over all labels of one family."""
    return sum(value for name, value in samples.items() if name.split("{")[0] == family)


def generate_body(picture: bytes | None, text: str = QUESTION, **sampling: Any) -> dict[str, Any]:
    """A request for the generate endpoints."""
    parameters = json.dumps({"max_tokens": 8, **sampling})
    body = {"text_input": text, "exclude_input_in_output": True, "sampling_parameters": parameters}
    return body if picture is None else body | {"image": base64.b64encode(picture).decode()}
