"""How ordinary small things look: fittings on walls and ceilings, and small things on the floor."""

import math

from .brush import Brush, blob
from .geometry import Colour
from .palette import THINGS, mix, shade


def socket_plate(brush: Brush, s0: float, t0: float, s1: float, t1: float, rgb: Colour) -> None:
    """A plate with a round or square well and two holes."""
    w, h = s1 - s0, t1 - t0
    edge = shade(rgb, 0.62) if sum(rgb) > 300 else shade(rgb, 1.9)
    brush.rect(s0, t0, s1, t1, edge)
    brush.rect(s0 + 0.05 * w, t0 + 0.05 * h, s1 - 0.05 * w, t1 - 0.05 * h, rgb)
    s, t = (s0 + s1) / 2, (t0 + t1) / 2
    if brush.item.variant < 3:
        brush.disc(s, t, 0.36 * w, 0.36 * h, edge)
        brush.disc(s, t, 0.31 * w, 0.31 * h, shade(rgb, 0.88))
    else:
        brush.rect(s - 0.3 * w, t - 0.3 * h, s + 0.3 * w, t + 0.3 * h, shade(rgb, 0.85))
    hole = (30, 30, 32) if sum(rgb) > 300 else (215, 215, 215)
    for side in (-1, 1):
        brush.disc(s + side * 0.15 * w, t, 0.07 * w, 0.07 * h, hole)


def socket(brush: Brush) -> None:
    socket_plate(brush, 0.0, 0.0, 1.0, 1.0, brush.item.rgb)


def switch(brush: Brush) -> None:
    brush.rect(0, 0, 1, 1, (165, 165, 160))
    brush.rect(0.06, 0.06, 0.94, 0.94, (238, 237, 230))
    brush.rect(0.25, 0.2, 0.75, 0.8, (205, 204, 198))
    brush.rect(0.28, 0.2, 0.72, 0.5, (246, 246, 242))


def smoke_detector(brush: Brush) -> None:
    """A white disc with a grey slotted rim and a red light."""
    brush.disc(0.5, 0.52, 0.5, 0.48, (118, 118, 116))
    brush.disc(0.5, 0.46, 0.48, 0.44, (248, 248, 246))
    brush.disc(0.5, 0.46, 0.34, 0.3, (150, 150, 148))
    brush.disc(0.5, 0.44, 0.28, 0.25, (244, 244, 240))
    brush.disc(0.62, 0.44, 0.07, 0.09, (220, 20, 24))


def fire_extinguisher(brush: Brush) -> None:
    """A slim red cylinder, black head, lever and hose, white label."""
    red = brush.item.rgb
    brush.rect(0.16, 0.96, 0.84, 1.0, (30, 30, 32))
    brush.poly(
        [(0.14, 0.32), (0.2, 0.25), (0.35, 0.2), (0.65, 0.2), (0.8, 0.25), (0.86, 0.32), (0.86, 0.97), (0.14, 0.97)],
        red,
    )
    brush.rect(0.7, 0.3, 0.86, 0.97, shade(red, 0.66))
    brush.rect(0.24, 0.3, 0.32, 0.94, mix(red, (255, 255, 255), 0.45))
    brush.rect(0.3, 0.48, 0.72, 0.72, (240, 236, 224))
    brush.rect(0.36, 0.54, 0.66, 0.58, (60, 60, 60))
    brush.rect(0.38, 0.08, 0.62, 0.21, (36, 36, 38))
    brush.poly([(0.3, 0.0), (0.95, 0.03), (0.95, 0.08), (0.3, 0.08)], (36, 36, 38))
    side = 1 if brush.item.variant % 2 else 0
    hose = [(0.38, 0.14), (0.08, 0.2), (0.02, 0.4), (0.05, 0.62)]
    brush.ribbon([(1 - s, t) if side else (s, t) for s, t in hose], (28, 28, 30), max(brush.size * 0.14, 1.5))


def bin_(brush: Brush) -> None:
    """An open waste bin, narrower at its foot."""
    rgb = brush.item.rgb
    brush.poly([(0.0, 0.06), (1.0, 0.06), (0.86, 1.0), (0.14, 1.0)], rgb)
    brush.poly([(0.7, 0.06), (1.0, 0.06), (0.86, 1.0), (0.66, 1.0)], shade(rgb, 0.72))
    brush.disc(0.5, 0.07, 0.5, 0.07, shade(rgb, 1.25))
    brush.disc(0.5, 0.08, 0.44, 0.05, shade(rgb, 0.35))


def cable(brush: Brush) -> None:
    """A straight conduit or a cable in clips."""
    wide = brush.aspect > 1
    rgb = ((225, 225, 220), (150, 150, 150), (60, 60, 62), (190, 175, 150))[brush.item.variant]
    rail = (0.0, 0.2, 1.0, 0.8) if wide else (0.2, 0.0, 0.8, 1.0)
    brush.rect(*rail, shade(rgb, 0.7))
    brush.rect(*((0.0, 0.2, 1.0, 0.6) if wide else (0.2, 0.0, 0.6, 1.0)), rgb)
    for i in range(4):
        k = 0.1 + 0.26 * i
        clip = shade(rgb, 0.5)
        brush.rect(*((k, 0.0, k + 0.03, 1.0) if wide else (0.0, k, 1.0, k + 0.03)), clip)


def cord(brush: Brush) -> None:
    """A curtain cord: two hanging strings that end in a tassel."""
    rgb = ((240, 236, 224), (150, 120, 80), (90, 90, 95), (170, 50, 50))[brush.item.variant]
    width = max(brush.size * 0.09, 1.2)
    brush.ribbon([(0.4, 0.0), (0.36, 0.5), (0.45, 0.8)], rgb, width)
    brush.ribbon([(0.6, 0.0), (0.64, 0.5), (0.55, 0.8)], rgb, width)
    brush.poly([(0.42, 0.78), (0.58, 0.78), (0.75, 1.0), (0.25, 1.0)], shade(rgb, 0.85))


def picture_frame(brush: Brush) -> None:
    """A framed picture: hills, shapes, or dark lines."""
    dice = brush.dice
    frame = THINGS[("brown", "black", "white", "yellow")[brush.item.variant]]
    edge = 0.08
    brush.rect(0, 0, 1, 1, shade(frame, 0.8))
    brush.rect(0.02, 0.02, 0.98, 0.98, frame)
    brush.rect(edge, edge, 1 - edge, 1 - edge, (236, 232, 222))
    span = 1 - 2 * edge
    style = dice.integer(4)
    if style == 0:
        brush.rect(edge, edge, 1 - edge, 0.6, (150, 190, 225))
        hill = [(edge + span * i / 6, 0.6 - 0.25 * dice.uniform(0, 1)) for i in range(7)]
        brush.poly([*hill, (1 - edge, 1 - edge), (edge, 1 - edge)], THINGS["green"])
        brush.disc(dice.uniform(0.25, 0.75), 0.25, 0.06, 0.06, (240, 220, 120))
    elif style == 1:
        for _ in range(4):
            s, t, r = dice.uniform(0.25, 0.75), dice.uniform(0.25, 0.75), dice.uniform(0.05, 0.16)
            brush.disc(s, t, r, r, THINGS[dice.pick(tuple(THINGS))])
    elif style == 2:
        for _ in range(5):
            line = [(edge + span * dice.uniform(0, 1), edge + span * dice.uniform(0, 1)) for _ in range(2)]
            brush.ribbon(line, (52, 48, 46), max(brush.size * 0.025, 1.2))
    else:
        brush.rect(0.2, 0.2, 0.8, 0.8, THINGS[dice.pick(tuple(THINGS))])
        brush.poly([(0.2 + s * 0.6, 0.2 + t * 0.6) for s, t in blob(dice, 0.4, 12)], (60, 55, 60))


def window(brush: Brush) -> None:
    """A window with sky, bars, a sill and sometimes curtains."""
    dice = brush.dice
    sky = dice.pick(((190, 218, 244), (215, 228, 238), (120, 160, 210), (60, 70, 100)))
    brush.rect(0, 0, 1, 1, (196, 194, 188))
    brush.rect(0.02, 0.02, 0.98, 0.96, (244, 243, 240))
    brush.rect(0.07, 0.07, 0.93, 0.9, sky)
    brush.rect(0.07, 0.48 + 0.1 * dice.uniform(0, 1), 0.93, 0.9, mix(sky, (90, 130, 80), 0.6))
    bars = brush.item.variant % 3
    for i in range(bars):
        s = (i + 1) / (bars + 1)
        brush.rect(s - 0.015, 0.05, s + 0.015, 0.92, (244, 243, 240))
    if dice.chance(0.5):
        brush.rect(0.05, 0.36, 0.95, 0.39, (244, 243, 240))
    brush.rect(0.0, 0.95, 1.0, 1.0, (214, 212, 206))
    if dice.chance(0.5):
        rgb = THINGS[dice.pick(("red", "blue", "green", "yellow", "white", "purple"))]
        for a, b in ((0.0, dice.uniform(0.12, 0.22)), (dice.uniform(0.78, 0.88), 1.0)):
            brush.rect(a, 0.0, b, 0.99, rgb)
            for i in range(3):
                s = a + (b - a) * (i + 0.5) / 3
                brush.rect(s, 0.0, s + (b - a) * 0.12, 0.99, shade(rgb, 0.78))


def door(brush: Brush) -> None:
    """A door leaf in its frame, with panels and a handle."""
    rgb = brush.item.rgb
    frame = mix(rgb, (235, 232, 226), 0.55) if brush.item.variant % 2 else shade(rgb, 0.62)
    brush.rect(0.0, 0.0, 1.0, 1.0, frame)
    brush.rect(0.07, 0.035, 0.93, 1.0, shade(rgb, 0.55))
    brush.rect(0.085, 0.042, 0.915, 1.0, rgb)
    for t0, t1 in ((0.1, 0.42), (0.52, 0.9)) if brush.item.variant < 2 else ((0.1, 0.3), (0.36, 0.56), (0.62, 0.92)):
        for s0, s1 in ((0.17, 0.46), (0.54, 0.83)):
            brush.rect(s0, t0, s1, t1, shade(rgb, 0.72))
            brush.rect(s0 + 0.025, t0 + 0.012, s1, t1, shade(rgb, 1.1))
            brush.rect(s0 + 0.03, t0 + 0.015, s1 - 0.025, t1 - 0.012, rgb)
    brush.disc(0.85, 0.48, 0.04, 0.022, (212, 190, 110))
    brush.rect(0.74, 0.47, 0.86, 0.487, (212, 190, 110))


def rug(brush: Brush) -> None:
    """A rug with a border and stripes, a rectangle or an oval."""
    rgb = brush.item.rgb
    trim = mix(rgb, (245, 235, 210), 0.6) if sum(rgb) < 600 else (150, 120, 90)
    if brush.item.variant == 3:
        brush.disc(0.5, 0.5, 0.5, 0.5, rgb)
        brush.disc(0.5, 0.5, 0.42, 0.42, trim)
        brush.disc(0.5, 0.5, 0.39, 0.39, rgb)
        return
    brush.rect(0, 0, 1, 1, rgb)
    brush.rect(0.05, 0.08, 0.95, 0.92, trim)
    brush.rect(0.065, 0.11, 0.935, 0.89, rgb)
    for i in range(brush.item.variant * 2):
        s = 0.12 + 0.8 * i / 4
        brush.rect(s, 0.11, s + 0.04, 0.89, shade(rgb, 0.75))


def plant(brush: Brush) -> None:
    """A pot with leaves."""
    dice = brush.dice
    pot = THINGS[("brown", "white", "grey", "orange")[brush.item.variant]]
    brush.poly([(0.28, 0.68), (0.72, 0.68), (0.66, 1.0), (0.34, 1.0)], pot)
    brush.poly([(0.56, 0.68), (0.72, 0.68), (0.66, 1.0), (0.56, 1.0)], shade(pot, 0.75))
    for _ in range(9 + dice.integer(6)):
        a = dice.uniform(-1.2, 1.2)
        r = dice.uniform(0.6, 1.0)
        tip = (0.5 + 0.5 * r * math.sin(a), 0.68 - 0.68 * r * math.cos(a))
        mid = (0.5 + (tip[0] - 0.5) * 0.5, 0.68 + (tip[1] - 0.68) * 0.55)
        w = dice.uniform(0.05, 0.09)
        green = shade(brush.item.rgb, dice.uniform(0.65, 1.3))
        brush.poly([(0.5, 0.68), (mid[0] - w, mid[1] - w * 0.4), tip, (mid[0] + w, mid[1] + w * 0.4)], green)
