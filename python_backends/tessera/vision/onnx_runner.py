"""The vision tower in onnxruntime on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.errors import ConfigError
from tessera.vision.intern_vit import load_vision, unfilled_tower, vision_fingerprint


class OnnxRunner:
    """Runs an exported vision graph; see ``onnx_graph.py`` for its input and output."""

    def __init__(self, model: Path | bytes, threads: int = 1, bytes_per_tile: int = 0) -> None:
        """``bytes_per_tile``: activations of a forward."""
        self._bytes_per_tile = bytes_per_tile
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # The stages share the cores: a thread that spins while it waits takes them from another stage.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # A quantised graph is here to be judged, so it computes what its nodes say; integer kernels round otherwise,
        # and there are none for float8.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.log_severity_level = 3
        source = model if isinstance(model, bytes) else str(model)
        self._session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    @classmethod
    def from_checkpoint(
        cls, config: CheckpointConfig, model: Path | None = None, threads: int = 1, random_weights: bool = False
    ) -> OnnxRunner:
        """Run the exported file ``model``, or without one a graph written in memory from the checkpoint.

        Raises ConfigError when the file was exported from other weights.
        """
        activations = unfilled_tower(config).activation_bytes(1, scores=True)
        if model is None:
            from tessera.vision.onnx_graph import vision_graph

            tower = load_vision(config, random_weights=random_weights)
            return cls(vision_graph(tower).SerializeToString(), threads, activations)
        if not model.is_file():
            raise ConfigError(f"{model} does not exist; export it with build/export_vision_onnx.py")
        runner = cls(model, threads, activations)
        stored = runner.fingerprint
        if not random_weights and stored != vision_fingerprint(config):
            raise ConfigError(
                f"{model} was exported from other weights than {config.folder} holds; "
                "export it again with build/export_vision_onnx.py"
            )
        return runner

    @property
    def fingerprint(self) -> str:
        """What the export recorded of the weights it was made from; "" if nothing."""
        return self._session.get_modelmeta().custom_metadata_map.get("tessera.fingerprint", "")

    def run(self, tiles: np.ndarray | torch.Tensor) -> torch.Tensor:
        """uint8 [n, side, side, 3] -> float32 [n, tokens per tile, hidden]."""
        (rows,) = self._session.run(["embeddings"], {"tiles": np.asarray(tiles)})
        return torch.from_numpy(rows)

    def activation_bytes(self, tiles: int) -> int:
        return tiles * self._bytes_per_tile
