"""The stage `vision_encoder` with its tower in eager torch: a launch a kernel, and torch's own kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.tritonserver import vision
from tessera.tritonserver.settings import StageSettings


class EagerSettings(StageSettings):
    """No user may choose the runner."""

    def read(self, kind: type) -> Any:
        return replace(super().read(kind), runner="torch")


vision.StageSettings = EagerSettings
TritonPythonModel = vision.TritonPythonModel
