"""How the hazards look. Each draws inside its item's box."""

import math

from .brush import Brush, blob
from .objects import socket_plate
from .palette import mix, shade

_STRANDS = ((200, 30, 30), (35, 60, 190), (210, 200, 40), (30, 30, 32), (110, 65, 35), (40, 140, 60))
_COPPER = (205, 122, 60)


def exposed_wire(brush: Brush) -> None:
    """A torn hole in the wall from which coloured strands with bare copper ends hang."""
    dice = brush.dice
    hole = blob(dice, 0.5, 12)
    brush.poly([(0.2 + s * 0.6, t * 0.46) for s, t in hole], (118, 108, 98))
    brush.poly([(0.29 + s * 0.42, 0.07 + t * 0.32) for s, t in hole], (28, 26, 26))
    count = 3 + dice.integer(2)
    width = max(brush.size * 0.11, 2.2)
    for i, rgb in enumerate(dice.shuffled(_STRANDS)[:count]):
        start = (0.4 + 0.2 * i / count, 0.2 + dice.uniform(-0.04, 0.04))
        end = (0.04 + 0.94 * (i + dice.uniform(0.2, 0.8)) / count, dice.uniform(0.75, 1.0))
        bend = dice.uniform(-0.2, 0.2)
        path = []
        for j in range(9):
            k = j / 8
            s = start[0] + (end[0] - start[0]) * k + bend * math.sin(math.pi * k)
            t = start[1] + (end[1] - start[1]) * (k + 0.3 * math.sin(math.pi * k) * (1 - k))
            path.append((min(max(s, 0.0), 1.0), min(t, 1.0)))
        brush.ribbon(path[:7], shade(rgb, 1.0), width * 1.3)
        brush.ribbon(path[6:], _COPPER, width * 1.1)


def crack(brush: Brush) -> None:
    """A jagged dark line across the box, with branches."""
    dice, item = brush.dice, brush.item
    dark = shade((58, 52, 48), dice.uniform(0.6, 1.1))
    down = dice.chance(0.5)
    tall = brush.aspect < 1
    n = 7 + dice.integer(4)
    path = []
    for i in range(n):
        along = i / (n - 1)
        across = along + (dice.uniform(-0.26, 0.26) if 0 < i < n - 1 else 0.0)
        across = min(max(across if down else 1 - across, 0.0), 1.0)
        path.append((across, along) if tall else (along, across))
    width = max(item.extent * dice.uniform(0.1, 0.13), 2.4)
    brush.ribbon(path, dark, width)
    for _ in range(1 + dice.integer(3)):
        k = 1 + dice.integer(n - 3)
        s, t = path[k]
        ds, dt = dice.uniform(-0.3, 0.3), dice.uniform(-0.3, 0.3)
        branch = [
            (min(max(s + ds * j / 3 + dice.uniform(-0.05, 0.05), 0), 1), min(max(t + dt * j / 3, 0), 1))
            for j in range(4)
        ]
        branch[0] = (s, t)
        brush.ribbon(branch, dark, width * 0.7)


def damp(brush: Brush) -> None:
    """A stain with a darker tide line, sometimes with mould."""
    dice, rgb = brush.dice, brush.item.rgb
    outline = blob(dice, 0.35, 26)
    soft = brush.size * 0.03
    brush.stain(outline, shade(rgb, 0.72), 0.9, soft)
    inner = [(0.5 + (s - 0.5) * 0.84, 0.5 + (t - 0.5) * 0.84) for s, t in outline]
    brush.stain(inner, mix(rgb, (200, 190, 170), 0.18), 0.85, soft)
    if brush.item.variant < 2:
        for _ in range(6 + dice.integer(8)):
            s, t = outline[dice.integer(26)]
            k = dice.uniform(0.1, 0.8)
            r = dice.uniform(0.03, 0.07)
            brush.disc(0.5 + (s - 0.5) * k, 0.5 + (t - 0.5) * k, r, r, (38, 42, 34))


def gas_bottle(brush: Brush) -> None:
    """A squat cylinder with round shoulders, a foot ring, a collar and a valve."""
    rgb = brush.item.rgb
    dark = shade(rgb, 0.5)
    brush.rect(0.14, 0.93, 0.86, 1.0, dark)
    body = [(0.0, 0.42), (0.03, 0.34), (0.12, 0.27), (0.3, 0.22), (0.7, 0.22), (0.88, 0.27), (0.97, 0.34)]
    brush.poly([*body, (1.0, 0.42), (1.0, 0.88), (0.93, 0.95), (0.07, 0.95), (0.0, 0.88)], rgb)
    brush.poly([(0.82, 0.27), (0.97, 0.34), (1.0, 0.42), (1.0, 0.88), (0.93, 0.95), (0.8, 0.95)], shade(rgb, 0.68))
    brush.poly([(0.14, 0.3), (0.26, 0.26), (0.26, 0.92), (0.14, 0.92)], mix(rgb, (255, 255, 255), 0.45))
    brush.rect(0.0, 0.56, 1.0, 0.6, dark)
    collar = brush.item.variant
    if collar < 3:
        brush.poly([(0.22, 0.04), (0.78, 0.04), (0.74, 0.23), (0.26, 0.23)], shade(rgb, 0.6))
        brush.poly([(0.34, 0.08), (0.66, 0.08), (0.63, 0.2), (0.37, 0.2)], (30, 30, 32))
    brush.rect(0.44, 0.06, 0.56, 0.23, (196, 168, 92))
    brush.rect(0.34, 0.0, 0.66, 0.07, (44, 44, 46))


def burnt_socket(brush: Brush) -> None:
    """A socket with soot rising from it and a charred, melted face."""
    dice = brush.dice
    soot = blob(dice, 0.5, 16)
    soft = brush.size * 0.05
    brush.stain([(0.04 + s * 0.92, t * 0.92) for s, t in soot], (52, 44, 38), 0.8, soft)
    socket_plate(brush, 0.12, 0.28, 0.88, 0.97, mix(brush.item.rgb, (190, 165, 120), 0.35))
    char = blob(dice, 0.5, 14)
    ds = dice.uniform(-0.08, 0.08)
    brush.stain([(0.2 + ds + s * 0.62, 0.2 + t * 0.62) for s, t in char], (92, 60, 36), 0.8, soft * 0.6)
    brush.stain([(0.28 + ds + s * 0.46, 0.26 + t * 0.46) for s, t in char], (22, 20, 20), 0.95, soft * 0.5)
