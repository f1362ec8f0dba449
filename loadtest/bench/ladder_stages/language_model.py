"""The stage `language_model` without CUDA graphs: a launch a kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.tritonserver import language_model
from tessera.tritonserver.settings import StageSettings


class EagerSettings(StageSettings):
    """No user may choose whether steps are recorded."""

    def read(self, kind: type) -> Any:
        return replace(super().read(kind), graph_batch_size=0)


language_model.StageSettings = EagerSettings
TritonPythonModel = language_model.TritonPythonModel
