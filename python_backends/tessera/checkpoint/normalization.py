"""What a checkpoint's image processor does to grey levels, as a mean and a standard deviation for each channel."""

import math
from collections.abc import Mapping
from typing import Any

from tessera.checkpoint.files import one_of
from tessera.errors import CheckpointError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
Channels = tuple[float, ...]
# An image processor's flags and what they may say; all others must be false.
_FLAGS = {"do_rescale": (True, False), "do_normalize": (True, False), "do_resize": (True,), "do_convert_rgb": (True,)}


def pixel_statistics(processor: Mapping[str, Any]) -> tuple[Channels, Channels]:
    """(mean, std) of each channel, for pixels in 0..1: what the tower sees is (x / 255 - mean) / std.

    transformers multiplies by ``rescale_factor``, then normalises with ``image_mean`` and ``image_std``, either step
    only where its flag is set. What is not stated is ImageNet's, as InternVL was trained.
    Raises CheckpointError for values that are no such numbers, and for flags that ask for any other step.
    """
    for name, value in processor.items():
        if name.startswith("do_"):
            one_of(value, _FLAGS.get(name, (False,)), f"the image processor's {name}")
    scale = 255.0
    if processor.get("do_rescale", True):
        scale *= _channels(processor, "rescale_factor", (1 / 255,), positive=True)[0]
    mean: Channels = (0.0, 0.0, 0.0)
    std: Channels = (1.0, 1.0, 1.0)
    if processor.get("do_normalize", True):
        mean = _channels(processor, "image_mean", IMAGENET_MEAN)
        std = _channels(processor, "image_std", IMAGENET_STD, positive=True)
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _channels(processor: Mapping[str, Any], name: str, default: Channels, positive: bool = False) -> tuple[float, ...]:
    """As many numbers as ``default`` has; one alone stands for all of them."""
    value = processor.get(name, default)
    numbers = value if isinstance(value, list | tuple) else [value] * len(default)
    if len(numbers) != len(default) or not all(
        type(number) in (int, float) and math.isfinite(number) and (number > 0 or not positive) for number in numbers
    ):
        raise CheckpointError(
            f"the image processor's {name} must be a {'positive ' if positive else ''}number, or one for each of the 3 "
            f"channels, not {value!r:.80}"
        )
    return tuple(map(float, numbers))
