"""A stage's settings, as its dataclass: from config.pbtxt's parameters and the environment."""

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from tessera.cascade import Policy, read_policy
from tessera.checkpoint.files import find_checkpoint
from tessera.models.registry import vision_tensors
from tessera.settings import schema
from tessera.settings.gpu import Division, ServerSettings, divide_for, find_device, refuse_limit, refuse_part_of_gpu
from tessera.settings.stages import refuse_unknown

Settings = TypeVar("Settings")


class StageSettings:
    """What one stage is told.

    Args:
        args: what the Python backend passes to ``initialize``: ``model_config`` (JSON), ``model_name``,
            ``model_repository`` (the folder of this one model).
        environment: the process's environment.

    Raises:
        ConfigError: a common setting has a value that it cannot have.
    """

    def __init__(self, args: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> None:
        self.stage = args["model_name"]
        self._environment = environment
        config = json.loads(args["model_config"])
        self.outputs = {output["name"] for output in config.get("output", ())}
        self.decoupled: bool = config.get("model_transaction_policy", {}).get("decoupled", False)
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self._sources = schema.Sources(self.stage, parameters, environment)
        self._models = Path(args["model_repository"]).parent
        # The launcher may have laid the repository out elsewhere, with links to the versions' folders.
        self._repository = (Path(args["model_repository"]) / "1").resolve().parents[1]
        self._server = schema.read(ServerSettings, self._sources, "")

    @property
    def checkpoint(self) -> Path:
        """The checkpoint folder. Raises CheckpointError where there is none."""
        return find_checkpoint(self._server.checkpoint, self._environment, self._repository).resolve()

    @property
    def device(self) -> str:
        """cpu or cuda. Raises ConfigError for a GPU on which results would be wrong."""
        said = self._server.device
        found = find_device(self._environment) if said == "auto" else said
        if found == "cuda":
            refuse_limit(self._environment)
        return found

    @property
    def policy(self) -> Policy:
        """preprocess's tile policy, if the environment says it: no stage reads another's config.pbtxt.

        Raises ConfigError.
        """
        said = self._environment.get("TESSERA_PREPROCESS_TILE_POLICY")
        return read_policy(None if said in ("", "0") else said)

    @property
    def grpc_address(self) -> str:
        """host:port of this server's own gRPC service.

        `tessera serve` says it in the environment; under a server started by hand it is the usual port.
        """
        return self._environment.get("TESSERA_GRPC_ADDRESS", "127.0.0.1:8001")

    def sources_of(self, stage: str) -> schema.Sources:
        """Of another stage what the environment says: none reads another's config.pbtxt."""
        return self._sources if stage == self.stage else schema.Sources(stage, {}, self._environment)

    def read(self, kind: type[Settings]) -> Settings:
        """The stage's dataclass. Raises ConfigError for what it does not know, or that cannot be."""
        refuse_unknown(self._sources, kind, ServerSettings)
        return schema.read(kind, self._sources, self.device, lambda: self._division)

    @cached_property
    def _division(self) -> Division:
        import torch

        gpu = torch.cuda.get_device_properties(0)
        refuse_part_of_gpu(gpu)
        language = (self._models / "language_model").is_dir()
        return divide_for(
            gpu.total_memory, self._server, self.checkpoint, self._sources, language, vision_tensors(self.checkpoint)
        )
