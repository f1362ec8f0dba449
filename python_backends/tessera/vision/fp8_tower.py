"""A tower with its linear layers in FP8, and the gate that it has to pass before it serves.

What FP8 costs depends on the weights: a channel of activations far larger than the others of its row takes their range
from them. So at every start some tiles go through the tower before and after, and rows that point elsewhere are a
refusal. The tiles are drawn, not shipped: :func:`gate_tiles` says what of pictures they have.
"""

import logging
from collections.abc import Mapping, Set

import torch
from torch import nn
from torch.nn import functional

from tessera.checkpoint.config import CheckpointConfig
from tessera.errors import ConfigError
from tessera.kernels.fp8_rows import MULTIPLE
from tessera.kernels.tower_layers import Fp8Linear
from tessera.models.tower import Tower, load_tower, stored_in_fp8, unfilled_tower
from tessera.settings.stages import VisionSettings

#: of a row in FP8 with the same row without, on average
LEAST_COSINE = 0.99

_LOG = logging.getLogger(__name__)


def linears_in_fp8(config: CheckpointConfig, settings: VisionSettings) -> Set[str]:
    """The tower's linear layers that run in FP8: all if the settings say so; else those that the checkpoint means to,
    if the device can.

    Raises ConfigError where the settings ask for what the GPU cannot do.
    """
    unable = _unable(config, settings) if settings.device.startswith("cuda") else ""
    if settings.quantization == "fp8":
        if unable:
            raise ConfigError(f"quantization is fp8, and {unable}: set quantization to checkpoint or fp8-language")
        return unfilled_tower(config).fp8_linears().keys()
    return set() if settings.random_weights or unable else stored_in_fp8(config)


def _unable(config: CheckpointConfig, settings: VisionSettings) -> str:
    """Why a GPU cannot compute this tower in FP8; nothing if it can."""
    if torch.cuda.get_device_capability(settings.device) < (8, 9):
        return f"{torch.cuda.get_device_name(settings.device)} has no FP8 units"
    if settings.dtype != "bfloat16":
        return f"dtype is {settings.dtype}, while FP8 products are given in bfloat16"
    for name, linear in unfilled_tower(config).fp8_linears().items():
        if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
            return f"{name} is {linear.out_features} x {linear.in_features}, of which {MULTIPLE} is no divisor"
    return ""


def serving_tower(config: CheckpointConfig, settings: VisionSettings) -> Tower:
    """The tower of a checkpoint on the settings' device, in their dtype, its linear layers in FP8 where it runs so.

    Raises CheckpointError; ConfigError for a tower or a GPU that is to run in FP8 and cannot, or a tower whose rows
    that changes too much. If it was the checkpoint that meant it to, the tower runs with its weights dequantized.
    """
    dtype, device = getattr(torch, settings.dtype), settings.device
    names = linears_in_fp8(config, settings)
    if not names:
        return load_tower(config, dtype, settings.random_weights).to(device)
    tower: Tower = load_tower(config, random_weights=settings.random_weights)
    plain = {name: linear for name, linear in tower.fp8_linears().items() if name in names}
    # Of the weights as they are stored, not of their roundings to the tower's dtype.
    quantized = {name: Fp8Linear.of(linear, dtype, device) for name, linear in plain.items()}
    tower.to(dtype).to(device)
    pixels, wires = tower.squares(gate_tiles)
    pixels = pixels.to(device)
    with torch.inference_mode():
        expected = tower(pixels, wires)
        put(tower, quantized)
        try:
            check_rows(tower(pixels, wires), expected, "FP8")
        except ConfigError as error:
            if settings.quantization == "fp8":
                raise
            _LOG.warning("%s; it runs with its weights dequantized", error)
            put(tower, plain)
    return tower


def in_fp8(tower: Tower) -> bool:
    """Whether it has linear layers in FP8."""
    return any(isinstance(module, Fp8Linear) for module in tower.modules())


def put(tower: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Set modules by their names in the tower."""
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        setattr(tower.get_submodule(parent), leaf, module)


def check_rows(rows: torch.Tensor, expected: torch.Tensor, form: str) -> None:
    """rows in ``form`` and expected [n, hidden]. Raises ConfigError if on average they are no longer alike."""
    cosines = functional.cosine_similarity(rows.double(), expected.double(), dim=-1)
    mean, least = float(cosines.mean()), float(cosines.min())
    if not mean >= LEAST_COSINE:  # so that no number is a refusal too
        raise ConfigError(
            f"the vision tower in {form} gives other rows: their cosine with the unquantized tower's is {mean:.4f} on "
            f"average (least {least:.4f}) and must be {LEAST_COSINE}: set quantization to checkpoint or fp8-language"
        )
    _LOG.info("the vision tower runs in %s: cosine with the unquantized rows %.5f, least %.5f", form, mean, least)


def gate_tiles(shape: tuple[int, ...]) -> torch.Tensor:
    """uint8 [4, side, side, 3] of shape (side, side, 3): a scene, a page, a night, a flat drawing; always the same.

    A scene has a photograph's spectrum (amplitude 1/frequency) and colours that go together; a page black strokes on
    white, a word and a line apart; a night is a scene that is almost black, with lights; a drawing has even colours
    and sharp edges, and an empty background as thumbnails and paddings have.
    """
    side = shape[0]
    generator = torch.Generator().manual_seed(11)

    def noise(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator)

    def field() -> torch.Tensor:
        """0..1 [side, side, 1]"""
        frequency = torch.fft.fftfreq(side)
        radius = (frequency[:, None] ** 2 + frequency**2).sqrt().clamp(min=1 / side)
        values = torch.fft.ifft2(torch.fft.fft2(noise(side, side) - 0.5) / radius).real
        return ((values - values.min()) / (values.max() - values.min()))[:, :, None]

    brightness, hue = field(), field()
    scene = brightness * (0.6 + 0.4 * torch.cat((hue, 1 - (hue - 0.5).abs(), 1 - hue), dim=2))
    line, stroke = max(side // 28, 2), max(side // 112, 1)
    at = torch.arange(side)
    ink = (noise(side, side // stroke + 1) < 0.4).repeat_interleave(stroke, dim=1)[:, :side]
    written = (at % line < 2 * line // 3)[:, None] & (noise(side // line + 1, side) < 0.85)[at // line]
    page = (~(ink & written)).float()[:, :, None].expand(-1, -1, 3)
    night = scene.pow(3) * 0.3
    for y, x in (noise(6, 2) * (side - stroke)).long().tolist():
        night[y : y + 2 * stroke, x : x + 2 * stroke] = torch.tensor((1.0, 0.95, 0.7))
    drawing = torch.full((side, side, 3), 0.9)
    drawing[side // 8 : side // 2, side // 8 : side // 2] = torch.tensor((0.85, 0.1, 0.15))
    inside = (at[:, None] - 5 * side // 8) ** 2 + (at - 5 * side // 8) ** 2 < (side // 4) ** 2
    drawing[inside] = torch.tensor((0.1, 0.3, 0.8))
    return (torch.stack((scene, page, night, drawing)) * 255).round().to(torch.uint8)
