"""The empty room: five surfaces with procedural textures, skirting, and the shadows that lie on them.

Drawn at reduced resolution for large pictures (walls hold no detail that a label rests on), then enlarged.
"""

from functools import lru_cache

import cv2
import numpy as np

from .brush import blob
from .dice import Dice
from .geometry import Colour
from .palette import shade
from .parameters import Scene

_SIDE = 256  # pixels of a texture's repeating square
_DETAIL = 800  # the longer side up to which the background is drawn at full resolution


@lru_cache(maxsize=128)
def pattern(kind: str, seed: int) -> np.ndarray:
    """A repeating brightness pattern, uint8 [256, 256, 3], 128 = the surface's own colour."""
    random = np.random.Generator(np.random.PCG64(seed * 31 + sum(kind.encode())))
    y, x = np.mgrid[0:_SIDE, 0:_SIDE].astype(np.float32) / _SIDE
    out = np.full((_SIDE, _SIDE), 128, np.float32)
    if kind in ("plaster", "concrete", "carpet", "plain"):
        for cells, weight in {"plaster": ((64, 4), (16, 3)), "concrete": ((8, 9), (32, 6), (128, 4)),
                              "carpet": ((128, 10), (16, 3)), "plain": ((4, 3),)}[kind]:  # fmt: skip
            grid = random.standard_normal((cells, cells)).astype(np.float32)
            grid = np.pad(grid, ((0, 1), (0, 1)), mode="wrap")
            big = cv2.resize(grid, (_SIDE, _SIDE), interpolation=cv2.INTER_LINEAR)
            out += big * weight
    elif kind == "stripes":
        n = (4, 6, 8, 10)[seed % 4]
        out += 9 * np.sign(np.sin(2 * np.pi * n * x))
    elif kind == "dots":
        n = (4, 6, 8, 8)[seed % 4]
        r = np.hypot((x * n) % 1 - 0.5, (y * n) % 1 - 0.5)
        out += np.where(r < 0.2, -20, 4)
    elif kind == "damask":
        n = (2, 3, 4, 4)[seed % 4]
        wave = np.cos(2 * np.pi * n * x) * np.cos(2 * np.pi * n * y) + 0.6 * np.cos(4 * np.pi * n * (x + y))
        out += 9 * np.tanh(3 * wave)
    elif kind == "bricks":
        row = np.floor(y * 12)
        along = (x * 4 + 0.5 * (row % 2)) % 1
        joint = ((y * 12) % 1 < 0.1) | (along < 0.04)
        tone = random.standard_normal((12, 5))[row.astype(int), np.floor(x * 4 + 0.5 * (row % 2)).astype(int) % 4]
        out += np.where(joint, 14, tone * 5)
    elif kind == "tiles":
        n = (3, 4, 5, 4)[seed % 4]
        joint = ((x * n) % 1 < 0.035) | ((y * n) % 1 < 0.035)
        tone = random.standard_normal((8, 8))[np.floor(y * n).astype(int), np.floor(x * n).astype(int)]
        if seed >= 4:
            tone = tone * 0.4 + 4 * (-1) ** (np.floor(y * n) + np.floor(x * n))
        out += np.where(joint, -34, tone * 5)
    elif kind == "planks":
        n = 6
        row = np.floor(x * n).astype(int)
        shift = random.random(n)[row]
        joint = ((x * n) % 1 < 0.03) | ((y + shift) % 1 < 0.008)
        part = ((y + shift) % 1 < 0.5).astype(int)
        tone = random.standard_normal((n, 2))[row, part]
        grain = random.standard_normal((8, _SIDE)).astype(np.float32)
        wood = cv2.resize(np.vstack([grain, grain[:1]]), (_SIDE, _SIDE), interpolation=cv2.INTER_LINEAR)
        out += np.where(joint, -40, tone * 9 + wood * 4)
    return cv2.cvtColor(np.clip(out, 0, 255).astype(np.uint8), cv2.COLOR_GRAY2RGB)


def _tinted(kind: str, seed: int, rgb: Colour, across: int, down: int) -> np.ndarray:
    """The pattern in a colour, repeated; uint8 [256 down, 256 across, 3]."""
    factor = np.arange(256, dtype=np.float32)[:, None] / 128
    table = np.clip(factor * np.array(rgb, np.float32), 0, 255).astype(np.uint8)
    return cv2.repeat(cv2.LUT(pattern(kind, seed), table[None]), down, across)


def background(scene: Scene) -> np.ndarray:
    """The room without its items, uint8 [H, W, 3]."""
    room, look = scene.room, scene.look
    reduce = max(max(room.width, room.height) / _DETAIL, 1.0)
    width, height = round(room.width / reduce), round(room.height / reduce)
    image = np.empty((height, width, 3), np.uint8)
    cv2.rectangle(image, (0, 0), (width, height), look.wall_rgb, cv2.FILLED)  # no gap between surfaces
    near = room.deep * 0.12
    far = room.deep

    def corner(x: float, y: float, z: float) -> tuple[float, float]:
        u, v = room.project(x, y, z)
        return u / reduce, v / reduce

    wide, tall = room.wide, room.tall
    corners = {  # left or right, top or bottom, near or far
        a + b + c: corner(x, y, z)
        for a, x in (("l", 0.0), ("r", wide))
        for b, y in (("t", tall), ("b", 0.0))
        for c, z in (("n", near), ("f", far))
    }
    wall = (look.wall_pattern, look.wall_rgb)
    surfaces = (  # name, pattern, colour, light, corners clockwise from the texture's top left
        ("ceiling", "plain", look.ceiling_rgb, 1.0, "ltn rtn rtf ltf"),
        ("floor", look.floor_pattern, look.floor_rgb, 1.0, "lbf rbf rbn lbn"),
        ("left", *wall, 0.92, "ltn ltf lbf lbn"),
        ("right", *wall, 0.86, "rtf rtn rbn rbf"),
        ("back", *wall, 1.0, "ltf rtf rbf lbf"),
    )
    depth = far - near
    for name, kind, rgb, light, around in surfaces:
        target = np.array([corners[key] for key in around.split()], np.float32)
        rgb = shade(rgb, light)
        if kind == "plain":
            cv2.fillConvexPoly(image, np.round(target * 16).astype(np.int32), rgb, cv2.LINE_AA, 4)
            continue
        lengths = {"floor": (wide, depth), "left": (depth, tall), "right": (depth, tall)}.get(name, (wide, tall))
        across, down = (max(round(length / 1.6), 1) for length in lengths)
        texture = _tinted(kind, look.pattern_seed, rgb, across, down)
        _lay(image, texture, target)
    if look.skirting:
        _skirting(image, scene, corner)
    _shadows(image, scene, reduce)
    if reduce == 1:
        return image
    return np.asarray(cv2.resize(image, (room.width, room.height), interpolation=cv2.INTER_LINEAR))


def _lay(image: np.ndarray, texture: np.ndarray, target: np.ndarray) -> None:
    """Warps a texture onto the quadrilateral `target` (pixels, clockwise from the texture's top left)."""
    height, width = image.shape[:2]
    x0, y0 = np.maximum(np.floor(target.min(0)).astype(int), 0)
    x1, y1 = np.minimum(np.ceil(target.max(0)).astype(int) + 1, (width, height))
    if x1 <= x0 or y1 <= y0:
        return
    h, w = texture.shape[:2]
    source = np.array([(0, 0), (w, 0), (w, h), (0, h)], np.float32)
    matrix = cv2.getPerspectiveTransform(source, target - np.array([x0, y0], np.float32))
    part = image[y0:y1, x0:x1]
    warped = cv2.warpPerspective(
        texture, matrix, (x1 - x0, y1 - y0), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
    )
    mask = np.zeros(part.shape[:2], np.uint8)
    cv2.fillConvexPoly(mask, np.round((target - (x0, y0)) * 16).astype(np.int32), (255,), cv2.LINE_8, 4)
    cv2.copyTo(warped, mask, part)


def _skirting(image: np.ndarray, scene: Scene, corner) -> None:
    room = scene.room
    rgb = shade((238, 236, 230), 0.9) if scene.look.pattern_seed % 2 else shade(scene.look.floor_rgb, 0.6)
    high, near, far = 0.09, room.deep * 0.12, room.deep
    for points in (
        ((0, high, near), (0, high, far), (0, 0, far), (0, 0, near)),
        ((room.wide, high, far), (room.wide, high, near), (room.wide, 0, near), (room.wide, 0, far)),
        ((0, high, far), (room.wide, high, far), (room.wide, 0, far), (0, 0, far)),
    ):
        flat = np.array([corner(*p) for p in points], np.float32)
        cv2.fillConvexPoly(image, np.round(flat * 16).astype(np.int32), rgb, cv2.LINE_AA, 4)


def _shadows(image: np.ndarray, scene: Scene, reduce: float) -> None:
    """Soft shadows: under what stands, in the corners, and those that fall on walls from outside the picture."""
    room = scene.room
    height, width = image.shape[:2]
    small = 4  # the shadow map is smooth: a quarter of the resolution is plenty
    shadow = np.full((height // small + 1, width // small + 1), 255, np.uint8)
    k = 1 / (reduce * small)

    def fill(points: list[tuple[float, float]], level: int) -> None:
        flat = np.array([(round(u * k * 16), round(v * k * 16)) for u, v in points], np.int32)
        cv2.fillPoly(shadow, [flat], (level,), cv2.LINE_AA, 4)

    for item in scene.items:
        if item.kind == "shadow":
            dice = Dice(f"item {item.seed}")
            outline = blob(dice, 0.4, 14)
            fill([room.project(*item.point(s, t)) for s, t in outline], 150 + 15 * dice.integer(4))
        elif item.plane == "stand":
            foot = [item.point(s, 1.0, d) for s, d in ((-0.06, -0.05), (1.06, -0.05), (1.1, 1.0), (-0.1, 1.0))]
            fill([room.project(x, 0.0, min(max(z, 0.2), room.deep)) for x, _, z in foot], 140)
    cv2.GaussianBlur(shadow, (0, 0), max(width / small / 110, 0.8), shadow)
    full = cv2.resize(shadow, (width, height), interpolation=cv2.INTER_LINEAR)
    cv2.multiply(image, cv2.cvtColor(full, cv2.COLOR_GRAY2RGB), image, 1 / 255)
