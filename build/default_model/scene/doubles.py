"""Harmless things that look like a hazard from afar: only their detail tells them apart."""

import math

from .brush import Brush
from .palette import THINGS, mix, shade


def ornament(brush: Brush) -> None:
    """A round flower: coloured petals around a dark heart (from afar: an exposed wire)."""
    dice = brush.dice
    rgb = THINGS[dice.pick(("red", "blue", "yellow", "green"))]
    petals = 6 + dice.integer(3)
    for i in range(petals):
        a = 2 * math.pi * i / petals
        brush.disc(0.5 + 0.32 * math.cos(a), 0.5 + 0.32 * math.sin(a), 0.17, 0.17, rgb)
    brush.disc(0.5, 0.5, 0.26, 0.26, (240, 236, 224))
    brush.disc(0.5, 0.5, 0.19, 0.19, (40, 34, 32))


def garland(brush: Brush) -> None:
    """A smooth dark string that hangs between two pale knobs (from afar: a crack)."""
    dark = (60, 54, 48)
    down, mirrored = brush.item.variant < 2, brush.item.variant % 2 == 0
    arc = []
    for i in range(15):
        s = i / 14
        t = 0.06 + 0.88 * (1 - (2 * s - 1) ** 2 if down else s**2.2)
        arc.append((0.05 + 0.9 * (1 - s if mirrored else s), t))
    width = max(brush.item.extent * 0.1, 2.2)
    brush.ribbon(arc[:8], dark, width)
    brush.ribbon(arc[:6:-1], dark, width)
    ratio = 1 / brush.aspect
    for s, t in (arc[0], arc[-1]):
        brush.disc(s, t, 0.09 * ratio, 0.09, dark)
        brush.disc(s, t, 0.05 * ratio, 0.05, (250, 240, 190))


def wall_plate(brush: Brush) -> None:
    """A painted plate with light rings (from afar: damp)."""
    rgb = brush.item.rgb
    brush.disc(0.5, 0.5, 0.5, 0.5, shade(rgb, 0.7))
    for i, r in enumerate((0.42, 0.34, 0.26, 0.18, 0.1)):
        brush.disc(0.5, 0.5, r, r, shade(rgb, 0.8) if i % 2 else (222, 212, 190))


def vent(brush: Brush) -> None:
    """A white plate with a dark round grille of slats (from afar: a burnt socket)."""
    brush.rect(0, 0, 1, 1, (150, 148, 142))
    brush.rect(0.05, 0.05, 0.95, 0.95, (240, 238, 232))
    brush.disc(0.5, 0.5, 0.38, 0.38, (34, 32, 32))
    for i in range(4):
        t = 0.24 + 0.173 * i
        half = math.sqrt(max(0.36**2 - (t - 0.5) ** 2, 0.0))
        brush.rect(0.5 - half, t - 0.035, 0.5 + half, t + 0.035, (205, 200, 192))


def vase(brush: Brush) -> None:
    """A vase with a slim neck, a flared rim and pale bands (from afar: a gas bottle)."""
    rgb = brush.item.rgb
    left = [(0.24, 0.0), (0.38, 0.12), (0.36, 0.22), (0.06, 0.4), (0.0, 0.56), (0.1, 0.84), (0.26, 1.0)]
    brush.poly(left + [(1 - s, t) for s, t in reversed(left)], rgb)
    side = [(0.62, 0.12), (0.64, 0.22), (0.94, 0.4), (1.0, 0.56), (0.9, 0.84), (0.74, 1.0), (0.82, 0.56)]
    brush.poly(side, shade(rgb, 0.68))
    for t in (0.44, 0.58, 0.72):
        brush.rect(0.06, t, 0.94, t + 0.05, mix(rgb, (255, 250, 235), 0.75))
