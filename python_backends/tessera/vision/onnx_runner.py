"""A vision tower in onnxruntime on the CPU, from a graph that is exported on first use and kept."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.models import tower as towers
from tessera.models.tower import Tower, Wires, load_tower, onnx_writer, unfilled_tower, vision_fingerprint
from tessera.settings.stages import VisionSettings
from tessera.settings.user_cache import cache_folder, is_kept, remove_unused, source_digest, write_whole
from tessera.vision.fp8_tower import check_rows, gate_tiles

_LOG = logging.getLogger(__name__)
_HELD_TWICE = 64 << 20  # bytes of a graph
_SPIN_US = 30  # from one operation to the next
MOST_BYTES = (1 << 31) - (1 << 24)  # of weights in one protobuf message


class OnnxRunner:
    """Runs a graph of one input, the pixels, and one output, the rows; ``tower`` is the one it was written from.

    Units of cost go one by one where each of the ``threads`` can have one: that takes a tenth less of the cores than
    sharing every operation, as threads do with fewer units. So a tower is held twice, if it is small: in a large one's
    operations they wait little for each other. ``alone``: fewer go one by one, too. A graph in int8 rounds by the range
    of all that it is given, and a tile's rows must not depend on its neighbours.
    """

    beside = 0

    def __init__(self, model: Path | bytes, threads: int = 1, tower: Tower | None = None, alone: bool = False) -> None:
        self.tower: Any = tower
        self._alone = alone
        self._pool = ThreadPoolExecutor(max(1, threads))
        size = len(model) if isinstance(model, bytes) else model.stat().st_size
        twice = threads > 1 and size <= _HELD_TWICE
        self._shared = session_of(model, threads, _SPIN_US * twice)
        self._single = session_of(model, 1) if twice else self._shared
        self._enough = threads if twice else sys.maxsize
        self.at_once = 2 * threads if twice else 1  # threads wait for the last of them
        self._input = self._shared.get_inputs()[0].name

    @classmethod
    def from_checkpoint(cls, config: CheckpointConfig, settings: VisionSettings) -> OnnxRunner:
        """Raises CheckpointError."""
        int8 = settings.quantization == "int8"
        graph = _written(config, int8) if settings.random_weights else kept_graph(config, int8)
        return cls(graph, settings.forward_threads, unfilled_tower(config), int8)

    def run(self, pixels: np.ndarray | torch.Tensor, wires: Wires = ()) -> torch.Tensor:
        """float32 rows."""
        given = np.asarray(pixels)
        apart = len(given) >= self._enough
        session = self._single if apart else self._shared

        def rows(part: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(session.run(None, {self._input: part})[0])

        parts = given[:, None] if apart or self._alone else [given]
        return torch.cat([*(self._pool.map if apart else map)(rows, parts)]).flatten(0, -2)

    def activation_bytes(self, cost: int) -> int:
        return self.tower.activation_bytes(cost, scores=True)


def session_of(model: Path | bytes, threads: int, spin_us: int = 0) -> onnxruntime.InferenceSession:
    """The stages share the cores: a thread that waits longer than ``spin_us`` leaves its own to another stage."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin_us > 0)))
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(spin_us))
    # A quantised graph is here to be judged, so it computes what its nodes say; integer kernels round otherwise,
    # and there are none for float8.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def kept_graph(config: CheckpointConfig, int8: bool = False) -> Path | bytes:
    """The file of a checkpoint's graph in the user's cache, exported now if it is not there; its bytes if none can be.

    Several processes may do so at once: each writes the same file, whole. Files of the same weights that other code
    wrote go when nobody uses them any more.
    """
    fingerprint = vision_fingerprint(config)
    name = f"int8-{fingerprint}" if int8 else fingerprint
    path = graph_path(name)
    if is_kept(path):
        return path
    content = _written(config, int8, fingerprint)
    try:
        write_whole(path, lambda draft: draft.write_bytes(content))
        remove_unused(path.parent.glob(f"vision-{name}-*.onnx"))
    except OSError as error:
        _LOG.warning("the exported vision graph is not kept: %s", error)
        return content
    _LOG.info("exported the vision graph to %s (%.0f MiB)", path, len(content) / 2**20)
    return path


def graph_path(fingerprint: str) -> Path:
    """Where the graph of these weights, as today's code writes it, is kept."""
    code = source_digest(Path(towers.__file__).parent)  # the families' too
    return cache_folder() / f"vision-{fingerprint}-{code}.onnx"


def _written(config: CheckpointConfig, int8: bool, fingerprint: str = "") -> bytes:
    """Raises ConfigError where int8 changes the rows too much."""
    write = onnx_writer(config)
    tower = load_tower(config, random_weights=not fingerprint)
    graph = write(tower, fingerprint, int8).SerializeToString()
    if int8:
        pixels, wires = tower.squares(gate_tiles)
        with torch.inference_mode():
            expected = tower(pixels, wires)
        check_rows(OnnxRunner(graph, alone=True).run(pixels), expected, "int8")
    return graph
