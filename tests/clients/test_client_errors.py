"""Server faults become the right error, with the server's words and without tritonserver's prefixes."""

import pytest

from tessera_wire import errors

QUEUE = "in ensemble 'vlm', [request id: 17] Exceeds maximum queue size"
FULL = (
    "Failed to increase the shared memory pool size for key 'k' to 1048576 bytes. If you are running Triton "
    "inside docker, use '--shm-size' flag to control the shared memory region size. Error: No space left on device"
)


@pytest.mark.parametrize(
    ("message", "code", "kind", "text"),
    [
        ("in ensemble 'vlm', not a picture", "INVALID_ARGUMENT", errors.InvalidRequest, "not a picture"),
        ("in ensemble 'a', in ensemble 'b', [request id: <id_unknown>] x", "", errors.InvalidRequest, "x"),
        (QUEUE, "", errors.Unavailable, "Exceeds maximum queue size"),
        ("in ensemble 'vlm', UNAVAILABLE: 512 requests", "", errors.Unavailable, "512 requests"),
        ("UNAVAILABLE: 512 requests", "INTERNAL", errors.Unavailable, "512 requests"),
        ("INTERNAL: vision broke", "", errors.ServerError, "vision broke"),
        ("NOTE: this is text", "", errors.InvalidRequest, "NOTE: this is text"),
        ("512 requests are in flight", "", errors.Unavailable, "512 requests are in flight"),
        ("words about in flight", "INVALID_ARGUMENT", errors.InvalidRequest, "words about in flight"),
        ("Stub process 'pre_0_0' is not healthy.", "INTERNAL", errors.Unavailable, None),
        ("deadline exceeded after 50 ms", "UNAVAILABLE", errors.DeadlineExceeded, None),
        ("in ensemble 'e', cancelled", "", errors.Cancelled, "cancelled"),
        ("vision failed; the server's log says why", "", errors.ServerError, None),
        (
            "in ensemble 'vlm', Failed to process the request(s) for model 'pre_0_0', message: ValueError: boom"
            "\n\nAt:\n  /secret/model.py(13): execute\n",
            "INTERNAL",
            errors.ServerError,
            "Failed to process the request(s) for model 'pre_0_0', message: ValueError: boom",
        ),
        (f"in ensemble 'vlm', {FULL}", "", errors.Unavailable, FULL),
        (f"Failed to process the request(s) for model 'pre_0_0', message: {FULL}", "", errors.Unavailable, None),
        ("in ensemble 'vlm', failed to allocate 4 bytes", "", errors.ServerError, None),
        ("failed to parse the request JSON buffer: Invalid value. at 1", "", errors.InvalidRequest, None),
        ("", "INTERNAL", errors.ServerError, "the server gave no reason"),
        ("never heard of", "DATA_LOSS", errors.ServerError, "never heard of"),
    ],
)
def test_mapping(message: str, code: str, kind: type[errors.TesseraClientError], text: str | None) -> None:
    error = errors.from_server(message, code)
    assert type(error) is kind and (text is None or error.message == text)
    assert str(error) == error.message + (f" ({error.remedy})" if error.remedy else "")
