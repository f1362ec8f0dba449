"""What a scene is: plain parameters, from which pixels and labels follow."""

from dataclasses import dataclass

from .geometry import Colour, Item, Room

HAZARDS = ("exposed wire", "crack", "damp", "gas bottle", "blocked exit", "burnt socket")


@dataclass(frozen=True)
class Look:
    """What covers the room's surfaces: names (labels), colours and pattern names."""

    wall: str
    floor: str
    ceiling: str
    wall_rgb: Colour
    floor_rgb: Colour
    ceiling_rgb: Colour
    wall_pattern: str
    floor_pattern: str
    pattern_seed: int
    skirting: bool


@dataclass(frozen=True)
class Camera:
    """What light, lens, sensor and encoder do; lengths in pixels."""

    light: tuple[float, float, float]  # direction x, y and strength of the fall-off
    warmth: float
    blur: float
    noise: float
    quality: int
    seed: int


@dataclass(frozen=True)
class Scene:
    """All parameters of one picture. Equal (seed, split) give equal scenes."""

    seed: int
    split: str
    room: Room
    look: Look
    items: tuple[Item, ...]
    camera: Camera

    @property
    def width(self) -> int:
        return self.room.width

    @property
    def height(self) -> int:
        return self.room.height
