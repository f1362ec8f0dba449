"""What light, lens, sensor and encoder do to the drawn picture."""

from functools import lru_cache

import cv2
import numpy as np

from .parameters import Scene

_UNIT = 200  # the light map's value for "as drawn"
_SHEET = 2048
_SIGMA = 32


@lru_cache(maxsize=1)
def _noise_sheet() -> np.ndarray:
    """Sensor noise around 128, uint8 [2048, 2048, 3], made once a process; pictures use random parts of it."""
    random = np.random.Generator(np.random.PCG64(20250117))
    sheet = random.standard_normal((_SHEET, _SHEET, 3), dtype=np.float32)
    return np.clip(sheet * _SIGMA + 128, 0, 255).astype(np.uint8)


def light(image: np.ndarray, scene: Scene) -> None:
    """Multiplies a fall-off across the picture, warm or cold light, lamp glow and vignetting; in place."""
    room, camera = scene.room, scene.camera
    columns, rows = 32, 24
    x = np.linspace(-1, 1, columns, dtype=np.float32)[None]
    y = np.linspace(-1, 1, rows, dtype=np.float32)[:, None]
    dx, dy, fall = camera.light
    level = 1.0 - fall * 0.5 * (1 + (dx * x + dy * y) / 2) - 0.08 * (x * x + y * y)
    tint = np.array([1 + camera.warmth, 1.0, 1 - camera.warmth], np.float32)
    lights = level[..., None] * tint
    for item in scene.items:
        if item.kind in ("lamp", "window"):
            u, v = room.project(*item.point(0.5, 0.2))
            gx, gy = 2 * u / room.width - 1, 2 * v / room.height - 1
            glow = np.exp(-6 * ((x - gx) ** 2 + (y - gy) ** 2))[..., None]
            colour = (1.0, 0.93, 0.75) if item.kind == "lamp" else (0.9, 0.95, 1.0)
            lights = lights + 0.12 * glow * np.array(colour, np.float32)
    lights = np.clip(lights, 0.62, 1.2)
    small = (lights * _UNIT).astype(np.uint8)
    full = cv2.resize(small, (room.width, room.height), interpolation=cv2.INTER_LINEAR)
    cv2.multiply(image, full, image, 1 / _UNIT)


def lens_and_sensor(image: np.ndarray, scene: Scene) -> np.ndarray:
    """Blur, then noise."""
    camera = scene.camera
    if camera.blur > 0.3:
        side = 3 if camera.blur < 0.7 else 5
        image = cv2.GaussianBlur(image, (side, side), camera.blur)
    height, width = image.shape[:2]
    y, x = camera.seed % (_SHEET - height + 1), (camera.seed // 4096) % (_SHEET - width + 1)
    amount = camera.noise / _SIGMA
    return cv2.addWeighted(image, 1.0, _noise_sheet()[y : y + height, x : x + width], amount, -128 * amount)


def jpeg(image: np.ndarray, quality: int) -> bytes:
    """The RGB picture as a JPEG file."""
    ok, data = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not ok:
        raise RuntimeError("OpenCV could not encode the picture as JPEG: its JPEG codec is missing")
    return data.tobytes()
