"""A stand-in for ``triton_python_backend_utils``: tensors, responses, a sender as touchy as the real one."""

from __future__ import annotations

import json
import logging
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.launcher.settings import config_file, read_config

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
FINAL = 1


class Tensor:
    def __init__(self, name: str, values: np.ndarray) -> None:
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._values

    @staticmethod
    def from_dlpack(name: str, values: Any) -> Tensor:
        """A torch tensor's values; numpy has no bf16."""
        return Tensor(name, values.float().numpy().copy())


class TritonError(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "INTERNAL", "INVALID_ARG", "UNAVAILABLE", "CANCELLED"

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        super().__init__(message)
        self._code = code

    def code(self) -> str:
        return self._code

    def message(self) -> str:
        return str(self)


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self._tensors, self._error = output_tensors, error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Sender:
    """Fails the test where the real sender would crash the server or confuse the client."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.final = False
        self.cancelled = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.final, "a response after FINAL"
        if response is not None:
            self.responses.append(response)
        self.final = bool(flags & FINAL)

    def is_cancelled(self) -> bool:
        assert not self.final, "is_cancelled() after FINAL crashes tritonserver"
        return self.cancelled


class MetricFamily:
    """One family; its one member remembers what it was set to."""

    GAUGE = COUNTER = HISTOGRAM = "a kind"

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.values: list[float] = []

    def Metric(self, labels: dict[str, str]) -> MetricFamily:
        return self

    def set(self, value: float) -> None:
        self.values.append(value)

    def increment(self, step: float) -> None:
        self.values.append(step)


class InferenceRequest:
    """A request as a stage gets it."""

    def __init__(
        self,
        inputs: list[Tensor],
        request_id: str = "",
        timeout: int = 0,
        parameters: str = "{}",
        outputs: tuple[str, ...] = (),
    ) -> None:
        self.tensors, self.id, self.microseconds = inputs, request_id, timeout
        self.sent_parameters, self.asked_outputs = parameters, outputs
        self.sender = Sender()

    def parameters(self) -> str:
        """JSON, in which a name may stand twice."""
        return self.sent_parameters

    def inputs(self) -> list[Tensor]:
        return self.tensors

    def request_id(self) -> str:
        return self.id

    def timeout(self) -> int:
        return self.microseconds

    def requested_output_names(self) -> tuple[str, ...]:
        return self.asked_outputs

    def get_response_sender(self) -> Sender:
        return self.sender


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module, importable for the length of one test; `logged` holds what was written to the server's log."""
    module: Any = types.ModuleType("triton_python_backend_utils")
    module.Tensor, module.TritonError = Tensor, TritonError
    module.InferenceResponse, module.MetricFamily = InferenceResponse, MetricFamily
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    module.logged = []
    module.Logger = types.SimpleNamespace(
        **{f"log_{level}": module.logged.append for level in ("info", "warn", "error")}
    )

    def find(holder: Any, name: str) -> Tensor | None:
        tensors = holder.inputs() if isinstance(holder, InferenceRequest) else holder.output_tensors()
        return next((tensor for tensor in tensors if tensor.name() == name), None)

    module.get_input_tensor_by_name = module.get_output_tensor_by_name = find
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    package_log = logging.getLogger("tessera")  # a stage sends it to the backend, which is gone after the test
    for attribute in ("handlers", "level", "propagate"):
        monkeypatch.setattr(package_log, attribute, getattr(package_log, attribute))
    return module


def stage_args(model: str, config_name: str | None = None, **parameters: str) -> dict[str, str]:
    """What tritonserver gives a stage's initialize(), by config.pbtxt or a named config, parameters changed."""
    read = read_config(config_file(REPOSITORY, model, config_name))
    values = {name: parameter.string_value for name, parameter in read.parameters.items()} | parameters
    config = {
        "parameters": {name: {"string_value": value} for name, value in values.items()},
        "output": [{"name": output.name} for output in read.output],
    }
    return {"model_name": model, "model_repository": str(REPOSITORY / model), "model_config": json.dumps(config)}


def strings(name: str, *values: bytes) -> Tensor:
    return Tensor(name, np.array(values, dtype=np.object_))


def wait_until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    """Waits for another thread; fails the test if it takes longer than `seconds`."""
    pause = threading.Event()
    for _ in range(int(seconds * 200)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("the awaited condition did not come")
