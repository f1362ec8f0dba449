"""What answers here, in one line: equal ones of deterministic servers give answers of equal bits."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import tessera
from tessera.settings import schema
from tessera.settings.schema import Effective
from tessera.settings.stages import STAGES, EngineConfig, VisionSettings
from tessera.settings.user_cache import source_digest
from tessera.tritonserver.settings import StageSettings

# Said by the mode; and how much room there is, and who waits for whom, by which its answers do not change.
_WITHOUT_EFFECT = (
    *("deterministic", "max_batched_tokens", "max_sequences", "prefix_cache", "drafts"),
    *("max_images", "max_cost", "max_file_pixels", "max_request_bytes", "visual_infer_batch_size", "cache_bytes"),
)
_PACKAGES = ("torch", "triton", "onnxruntime", "numpy", "opencv-python-headless", "simplejpeg", "pillow", "tokenizers")
_TEXTS, _WEIGHTS = (".json", ".jinja", ".model", ".txt"), ".safetensors"
_PIECE = 1 << 24


def fingerprint(settings: StageSettings, config: EngineConfig) -> str:
    """weights.code.machine.mode, the first three as eight hexadecimal digits: of the checkpoint's files; of this
    package's source; of the processor or GPU, the libraries and the settings that shape answers.

    Only with ``deterministic`` are weights read as a whole, which takes a second a GB; else of their files the headers.
    """
    code = source_digest(Path(tessera.__file__).parent)
    parts = (_checkpoint(settings.checkpoint, config.deterministic), code, _digest(_machine(settings, config)))
    return ".".join((*(part[:8] for part in parts), "deterministic" if config.deterministic else "fast"))


def _checkpoint(folder: Path, whole: bool) -> str:
    files = sorted(file for file in folder.iterdir() if file.suffix in (*_TEXTS, _WEIGHTS))
    with ThreadPoolExecutor() as pool:  # hashing holds no lock
        return _digest(pool.map(partial(_file, whole=whole), files))


def _machine(settings: StageSettings, config: EngineConfig) -> Iterable[str]:
    yield _hardware(config.device)
    for package in _PACKAGES:
        try:
            yield f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    shown: set[Effective] = set()
    for stage, kind in STAGES.items():
        read: Any = schema.read(kind, settings.sources_of(stage), config.device, report=shown.add)
        if isinstance(read, VisionSettings):
            yield f"threads of a forward: {read.forward_threads}, of tiles in {read.in_dtype(tiles=True).dtype}"
    yield from sorted(f"{name}={value}" for name, value, _ in shown if name.split(".")[-1] not in _WITHOUT_EFFECT)
    yield repr(settings.policy)


def _hardware(device: str) -> str:
    import torch

    if device != "cpu":
        return f"{torch.cuda.get_device_name(0)} {torch.version.cuda}"
    named = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{named[:1]} {torch.backends.cpu.get_cpu_capability()}"


def _file(file: Path, whole: bool) -> str:
    digest = hashlib.blake2b(f"{file.name} {file.stat().st_size}".encode())
    with open(file, "rb") as stream:
        if file.suffix == _WEIGHTS and not whole:
            digest.update(stream.read(min(int.from_bytes(stream.read(8), "little"), _PIECE)))
        else:
            while piece := stream.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()


def _digest(texts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode()).hexdigest()
