"""A stage's settings: the ``parameters`` of its config.pbtxt, each open to an environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tessera.errors import ConfigError


class StageSettings:
    """Typed look-ups in one stage's parameters.

    ``TESSERA_<STAGE>_<PARAMETER>`` overrides a parameter of one stage, ``TESSERA_CHECKPOINT`` the checkpoint of all
    (config.pbtxt itself expands no variables).

    Args:
        args: what the Python backend passes to ``initialize``: ``model_config`` (JSON), ``model_name``,
            ``model_repository`` (the folder of this one model).
        environment: the process's environment.
    """

    def __init__(self, args: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> None:
        self.stage = args["model_name"]
        self._model_folder = Path(args["model_repository"])
        self._environment = environment
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self._values = {key: value["string_value"] for key, value in parameters.items()}

    @property
    def checkpoint(self) -> Path:
        """The checkpoint folder; a relative one counts from the model repository."""
        value = self._environment.get("TESSERA_CHECKPOINT") or self.text("checkpoint")
        return (self._model_folder.parent / value).resolve()

    @property
    def grpc_address(self) -> str:
        """host:port of this server's own gRPC service; what stands behind a comma is not asked.

        `tessera serve` says it in the environment.
        """
        return self._environment.get("TESSERA_GRPC_ADDRESS") or self.text("grpc_address")

    def text(self, name: str) -> str:
        override = self._environment.get(f"TESSERA_{self.stage}_{name}".upper())
        if override is not None:
            return override
        try:
            return self._values[name]
        except KeyError:
            raise ConfigError(f"{self.stage}/config.pbtxt lacks the parameter {name!r}") from None

    def integer(self, name: str) -> int:
        value = self.text(name)
        try:
            return int(value)
        except ValueError:
            raise ConfigError(f"{self.stage}: parameter {name!r} wants a whole number, got {value!r}") from None
