"""Named colours (RGB). The names are the answers to colour questions, so neighbours are kept well apart."""

from .dice import Dice
from .geometry import Colour

THINGS: dict[str, Colour] = {
    "red": (185, 38, 40),
    "blue": (45, 85, 185),
    "green": (48, 130, 62),
    "yellow": (228, 192, 48),
    "orange": (232, 122, 32),
    "brown": (118, 74, 40),
    "black": (40, 40, 44),
    "white": (240, 240, 238),
    "grey": (132, 135, 138),
    "purple": (118, 58, 150),
}
WALLS: dict[str, Colour] = {
    "white": (236, 235, 230),
    "beige": (222, 202, 165),
    "grey": (176, 178, 181),
    "blue": (152, 186, 218),
    "green": (164, 202, 158),
    "yellow": (238, 222, 142),
    "pink": (232, 184, 190),
}
FLOORS: dict[str, Colour] = {
    "brown": (142, 98, 60),
    "grey": (128, 130, 132),
    "beige": (206, 186, 150),
    "red": (158, 76, 58),
    "black": (66, 64, 66),
}
CEILINGS: dict[str, Colour] = {"white": (240, 240, 238), "beige": (226, 212, 184), "grey": (190, 192, 194)}
GAS_BOTTLES = ("blue", "grey", "orange", "green", "yellow")


def jitter(dice: Dice, rgb: Colour, amount: float = 10.0) -> Colour:
    """The colour moved a little in brightness and hue."""
    shift, hue = dice.uniform(-amount, amount), amount / 2
    r, g, b = rgb
    return (
        _level(r + shift + dice.uniform(-hue, hue)),
        _level(g + shift + dice.uniform(-hue, hue)),
        _level(b + shift + dice.uniform(-hue, hue)),
    )


def _level(value: float) -> int:
    return 8 if value < 8 else 250 if value > 250 else int(value)


def distance(a: Colour, b: Colour) -> int:
    """The largest difference of a channel, in grey levels."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def shade(rgb: Colour, factor: float) -> Colour:
    """The colour made darker (factor < 1) or lighter."""
    r, g, b = (int(min(max(c * factor, 0), 255)) for c in rgb)
    return r, g, b


def mix(a: Colour, b: Colour, part: float) -> Colour:
    """The colour `part` of the way from a to b."""
    r, g, bl = (int(x + (y - x) * part) for x, y in zip(a, b, strict=True))
    return r, g, bl
