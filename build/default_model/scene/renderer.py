"""From a scene's parameters to pixels."""

import numpy as np

from . import doubles, effects, furniture, hazards, objects, room
from .brush import Brush
from .parameters import Scene

# Who draws a kind bears its name.
_DRAW = {
    name.rstrip("_").replace("_", " "): draw
    for module in (objects, furniture, doubles, hazards)
    for name, draw in vars(module).items()
    if getattr(draw, "__module__", "") == module.__name__
}


def render(scene: Scene) -> np.ndarray:
    """The picture, uint8 RGB [H, W, 3], without JPEG artefacts. Pixels may differ by OpenCV version."""
    image = room.background(scene)
    for item in sorted(scene.items, key=lambda item: item.order):
        draw = _DRAW.get(item.kind)
        if draw is not None:
            draw(Brush(image, scene.room, item))
    effects.light(image, scene)
    return effects.lens_and_sensor(image, scene)


def encode_jpeg(scene: Scene) -> bytes:
    """The picture as a JPEG file of the scene's quality (60..95)."""
    return effects.jpeg(render(scene), scene.camera.quality)
