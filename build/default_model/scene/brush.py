"""Antialiased shapes in an item's own coordinates (s right, t down, d away; each 0..1 over the item)."""

import math
from collections.abc import Iterable, Sequence

import cv2
import numpy as np

from .dice import Dice
from .geometry import Colour, Item, Room
from .palette import shade

_BITS = 4  # fractional bits of the coordinates given to OpenCV
_ONE = 1 << _BITS


class Brush:
    """Draws on `image` (uint8 [H, W, 3], changed in place) in the coordinates of one item."""

    def __init__(self, image: np.ndarray, room: Room, item: Item) -> None:
        self.image, self.room, self.item = image, room, item
        self.dice = Dice(f"item {item.seed}")
        u0, v0 = self.at(0, 0)
        u1, v1 = self.at(1, 1)
        self.size = max(min(abs(u1 - u0), abs(v1 - v0)), 1.0)  # pixels: the shorter extent of the front
        self.aspect = max(abs(u1 - u0), 1.0) / max(abs(v1 - v0), 1.0)

    def at(self, s: float, t: float, d: float = 0.0) -> tuple[float, float]:
        """The pixel of a point of the item."""
        return self.room.project(*self.item.point(s, t, d))

    def _fixed(self, points: Iterable[Sequence[float]]) -> np.ndarray:
        flat = [self.at(*p) for p in points]
        return np.array([(round(u * _ONE), round(v * _ONE)) for u, v in flat], np.int32)

    def poly(self, points: Iterable[Sequence[float]], rgb: Colour) -> None:
        """A filled polygon."""
        cv2.fillPoly(self.image, [self._fixed(points)], rgb, cv2.LINE_AA, _BITS)

    def rect(self, s0: float, t0: float, s1: float, t1: float, rgb: Colour, d: float = 0.0) -> None:
        """A filled rectangle on the plane d."""
        self.poly(((s0, t0, d), (s1, t0, d), (s1, t1, d), (s0, t1, d)), rgb)

    def disc(self, s: float, t: float, rs: float, rt: float, rgb: Colour, d: float = 0.0) -> None:
        """A filled ellipse with radii rs, rt."""
        n = 20 if self.size * rt > 8 else 12
        turn = 2 * math.pi / n
        self.poly([(s + rs * math.cos(i * turn), t + rt * math.sin(i * turn), d) for i in range(n)], rgb)

    def ribbon(self, points: Sequence[tuple[float, float]], rgb: Colour, width: float) -> None:
        """A line of exact, possibly fractional width in pixels, tapering to half at its end."""
        flat = [self.at(*p) for p in points]
        last = len(flat) - 1
        left, right = [], []
        for i, (u, v) in enumerate(flat):
            (ua, va), (ub, vb) = flat[max(i - 1, 0)], flat[min(i + 1, last)]
            du, dv = ub - ua, vb - va
            norm = math.hypot(du, dv) or 1.0
            half = width / 2 * (1 - 0.5 * i / last)
            left.append((u - dv / norm * half, v + du / norm * half))
            right.append((u + dv / norm * half, v - du / norm * half))
        outline = np.array([(round(u * _ONE), round(v * _ONE)) for u, v in left + right[::-1]], np.int32)
        cv2.fillPoly(self.image, [outline], rgb, cv2.LINE_AA, _BITS)

    def cuboid(self, s0: float, t0: float, d0: float, s1: float, t1: float, d1: float, rgb: Colour) -> None:
        """A box with its front at d0, its back at d1; only the faces that the camera sees."""
        item, room = self.item, self.room
        cx, cy = room.camera
        x0, y1, _ = item.point(s0, t0)
        x1, y0, _ = item.point(s1, t1)
        if any(item.d):
            if x1 < cx:
                self.poly(((s1, t0, d0), (s1, t0, d1), (s1, t1, d1), (s1, t1, d0)), shade(rgb, 0.72))
            elif x0 > cx:
                self.poly(((s0, t0, d0), (s0, t0, d1), (s0, t1, d1), (s0, t1, d0)), shade(rgb, 0.72))
            if y1 < cy:
                self.poly(((s0, t0, d0), (s1, t0, d0), (s1, t0, d1), (s0, t0, d1)), shade(rgb, 1.14))
            elif y0 > cy:
                self.poly(((s0, t1, d0), (s1, t1, d0), (s1, t1, d1), (s0, t1, d1)), shade(rgb, 0.55))
        self.rect(s0, t0, s1, t1, rgb, d0)

    def window(self, margin: float = 0.0) -> tuple[int, int, int, int]:
        """The item's pixel box grown by `margin` of its size, as integers inside the picture."""
        x0, y0, x1, y1 = self.item.box
        gx, gy = (x1 - x0) * margin, (y1 - y0) * margin
        height, width = self.image.shape[:2]
        return (max(int(x0 - gx), 0), max(int(y0 - gy), 0), min(int(x1 + gx) + 1, width), min(int(y1 + gy) + 1, height))

    def stain(self, points: Sequence[Sequence[float]], rgb: Colour, strength: float, soft: float) -> None:
        """Blends a soft-edged polygon into the picture; `strength` 0..1, `soft` pixels of blur."""
        pad = int(3 * soft) + 2
        fixed = self._fixed(points)
        low, high = fixed.min(0) >> _BITS, fixed.max(0) >> _BITS
        height, width = self.image.shape[:2]
        x0, y0 = max(int(low[0]) - pad, 0), max(int(low[1]) - pad, 0)
        x1, y1 = min(int(high[0]) + pad + 1, width), min(int(high[1]) + pad + 1, height)
        if x1 <= x0 or y1 <= y0:
            return
        mask = np.zeros((y1 - y0, x1 - x0), np.uint8)
        local: np.ndarray = fixed - np.array([x0 << _BITS, y0 << _BITS], np.int32)
        cv2.fillPoly(mask, [local], (round(255 * strength),), cv2.LINE_AA, _BITS)
        if soft > 0.3:
            cv2.GaussianBlur(mask, (0, 0), soft, mask)
        part = self.image[y0:y1, x0:x1]
        alpha = mask[..., None].astype(np.uint16)
        part[:] = ((part * (255 - alpha) + alpha * np.array(rgb, np.uint16)) // 255).astype(np.uint8)


def blob(dice: Dice, rough: float, n: int = 18) -> list[tuple[float, float]]:
    """An irregular closed outline in the unit square."""
    phases = [dice.uniform(0, 6.28) for _ in range(3)]
    points = []
    for i in range(n):
        a = 2 * math.pi * i / n
        wave = sum(math.sin((k + 2) * a + p) / (k + 1.5) for k, p in enumerate(phases))
        r = 0.5 * (1 - rough * (0.5 - 0.33 * wave) * dice.uniform(0.7, 1.3))
        r = min(r, 0.5)
        points.append((0.5 + r * math.cos(a), 0.5 + r * math.sin(a)))
    return points
