"""How furniture looks: boxes in perspective, seen from the front."""

from .brush import Brush
from .palette import mix, shade


def sofa(brush: Brush) -> None:
    rgb, arm = brush.item.rgb, 0.13
    for s in (0.06, 0.9):
        brush.rect(s, 0.9, s + 0.04, 1.0, (50, 38, 28))
    brush.cuboid(0.02, 0.0, 0.7, 0.98, 0.9, 1.0, shade(rgb, 0.92))
    count = 2 + brush.item.variant % 2
    for i in range(count):
        a = arm + (1 - 2 * arm) * i / count
        b = arm + (1 - 2 * arm) * (i + 1) / count
        brush.rect(a + 0.008, 0.06, b - 0.008, 0.6, shade(rgb, 1.06), 0.66)
    brush.cuboid(arm, 0.5, 0.0, 1 - arm, 0.92, 0.7, rgb)
    for i in range(1, count):
        s = arm + (1 - 2 * arm) * i / count
        brush.rect(s - 0.004, 0.5, s + 0.004, 0.7, shade(rgb, 0.6))
    brush.rect(arm, 0.69, 1 - arm, 0.71, shade(rgb, 0.6))
    brush.cuboid(0.0, 0.3, 0.0, arm, 0.93, 0.95, shade(rgb, 1.04))
    brush.cuboid(1 - arm, 0.3, 0.0, 1.0, 0.93, 0.95, shade(rgb, 0.96))
    if brush.item.variant >= 2:
        brush.poly([(0.2, 0.28), (0.33, 0.24), (0.36, 0.5), (0.21, 0.52)], mix(rgb, (245, 225, 190), 0.7))


def bed(brush: Brush) -> None:
    rgb = brush.item.rgb
    wood = ((110, 70, 40), (60, 45, 38), (200, 195, 185), (150, 105, 65))[brush.item.variant]
    brush.cuboid(0.0, 0.0, 0.95, 1.0, 0.95, 1.0, wood)
    brush.cuboid(0.0, 0.68, 0.0, 1.0, 1.0, 0.95, wood)
    brush.cuboid(0.02, 0.5, 0.02, 0.98, 0.72, 0.94, (238, 236, 230))
    brush.cuboid(0.01, 0.48, 0.01, 0.99, 0.8, 0.62, rgb)
    for a in (0.08, 0.54):
        brush.cuboid(a, 0.36, 0.72, a + 0.38, 0.5, 0.92, (246, 245, 240))


def wardrobe(brush: Brush) -> None:
    rgb = brush.item.rgb
    line = shade(rgb, 0.5) if sum(rgb) > 150 else (95, 95, 98)
    brush.cuboid(0.0, 0.0, 0.0, 1.0, 1.0, 1.0, rgb)
    doors = 2 + brush.item.variant % 2
    for i in range(doors):
        a, b = 0.02 + 0.96 * i / doors, 0.02 + 0.96 * (i + 1) / doors
        brush.rect(a + 0.006, 0.025, b - 0.006, 0.95, line)
        brush.rect(a + 0.016, 0.033, b - 0.016, 0.942, shade(rgb, 1.05))
        k = b - 0.06 if i % 2 == 0 else a + 0.04
        brush.rect(k, 0.46, k + 0.02, 0.56, (205, 200, 190) if sum(rgb) < 500 else (90, 90, 92))
    brush.rect(0.0, 0.955, 1.0, 1.0, shade(rgb, 0.6))


def chest(brush: Brush) -> None:
    rgb = brush.item.rgb
    brush.cuboid(0.0, 0.0, 0.0, 1.0, 1.0, 1.0, rgb)
    rows = 3
    for i in range(rows):
        t = 0.05 + 0.9 * i / rows
        brush.rect(0.04, t, 0.96, t + 0.27, shade(rgb, 0.55))
        brush.rect(0.055, t + 0.015, 0.945, t + 0.255, shade(rgb, 1.06))
        brush.rect(0.44, t + 0.1, 0.56, t + 0.14, (70, 68, 66))


def table(brush: Brush) -> None:
    rgb = brush.item.rgb
    for d0, d1 in ((0.88, 0.98), (0.02, 0.12)):
        for s in (0.03, 0.91):
            brush.cuboid(s, 0.1, d0, s + 0.06, 1.0, d1, shade(rgb, 0.8))
    brush.cuboid(0.0, 0.0, 0.0, 1.0, 0.12, 1.0, rgb)


def chair(brush: Brush) -> None:
    rgb, leg = brush.item.rgb, shade(brush.item.rgb, 0.65)
    for s in (0.04, 0.86):
        brush.cuboid(s, 0.0, 0.9, s + 0.1, 1.0, 1.0, leg)
    if brush.item.variant % 2:
        for t in (0.04, 0.18, 0.32):
            brush.rect(0.1, t, 0.9, t + 0.09, rgb, 0.95)
    else:
        brush.rect(0.08, 0.03, 0.92, 0.42, rgb, 0.95)
    for s in (0.02, 0.88):
        brush.cuboid(s, 0.55, 0.0, s + 0.1, 1.0, 0.1, leg)
    brush.cuboid(0.0, 0.5, 0.0, 1.0, 0.58, 1.0, rgb)


def lamp(brush: Brush) -> None:
    rgb = brush.item.rgb
    brush.disc(0.5, 0.98, 0.3, 0.02, (48, 46, 46))
    brush.rect(0.46, 0.25, 0.54, 0.98, (70, 66, 62))
    brush.poly([(0.24, 0.0), (0.76, 0.0), (1.0, 0.3), (0.0, 0.3)], rgb)
    brush.poly([(0.34, 0.0), (0.62, 0.0), (0.74, 0.3), (0.28, 0.3)], mix(rgb, (255, 244, 205), 0.4))


def radiator(brush: Brush) -> None:
    brush.cuboid(0.0, 0.0, 0.0, 1.0, 0.88, 1.0, (228, 228, 224))
    for i in range(10):
        s = 0.04 + 0.093 * i
        brush.rect(s, 0.06, s + 0.03, 0.82, (180, 180, 178))


def box(brush: Brush) -> None:
    """A cardboard box with tape and a mark."""
    rgb = brush.item.rgb
    brush.cuboid(0.0, 0.0, 0.0, 1.0, 1.0, 1.0, rgb)
    brush.rect(0.44, 0.0, 0.56, 0.4, shade(rgb, 1.25))
    brush.rect(0.0, 0.0, 1.0, 0.02, shade(rgb, 0.7))
    if brush.item.variant >= 2:
        brush.rect(0.62, 0.6, 0.9, 0.85, shade(rgb, 0.6))
