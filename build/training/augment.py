"""Pictures to tiles on the training device under random tile policies, and the dense supervision's targets."""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from scene.geometry import TILE, tile_grid

PATCH = 28
GRID = TILE // PATCH


@dataclass(frozen=True)
class Policy:
    """How a picture is tiled: bounds of the grid's area; is the whole picture the last tile ("auto": if several)?"""

    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: str = "auto"


DEFAULT = Policy()
TWO_TILES = Policy(2, 2, "never")


@dataclass(frozen=True)
class Layout:
    columns: int
    rows: int
    thumbnail: bool

    @property
    def tiles(self) -> int:
        return self.columns * self.rows + self.thumbnail


def layout(width: int, height: int, policy: Policy) -> Layout:
    """InternVL's grid, and the whole picture as one more tile where the policy says so."""
    columns, rows = tile_grid(width, height, policy.max_tiles, policy.min_tiles)
    several = (columns, rows) != (1, 1)
    return Layout(columns, rows, policy.thumbnail == "always" or (policy.thumbnail == "auto" and several))


def random_policy(rng: random.Random) -> Policy:
    """Half the time what the server does by default, else any of the policies that it may be asked for."""
    kind = rng.random()
    if kind < 0.5:
        return DEFAULT
    if kind < 0.6:
        return TWO_TILES
    if kind < 0.7:
        return Policy(1, 1)
    return Policy(1, rng.randint(1, 12), rng.choice(("auto", "auto", "never", "always")))


class Cutter:
    """Cuts pictures into tiles, row by row, the thumbnail last, resized as Pillow's BICUBIC within a few grey levels.

    Two half-precision matrix products a picture, several times as fast on a GPU as its own resizing. The matrices are
    kept: pictures come in few sizes.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._dtype = torch.half if device.type == "cuda" else torch.float  # half is slow on a CPU
        self._matrices: dict[tuple[int, int], torch.Tensor] = {}

    def matrix(self, size: int, target: int) -> torch.Tensor:
        """[target, size], the antialiased bicubic resize of a line (a = -0.5)."""
        if (size, target) not in self._matrices:
            scale = size / target
            spread = max(scale, 1.0)
            places = torch.arange(size, device=self._device) + 0.5
            centres = (torch.arange(target, device=self._device) + 0.5) * scale
            x = ((places[None] - centres[:, None]) / spread).abs()
            near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
            weights = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
            self._matrices[size, target] = (weights / weights.sum(1, keepdim=True)).to(self._dtype)
        return self._matrices[size, target]

    def __call__(self, picture: torch.Tensor, plan: Layout, out: torch.Tensor) -> None:
        """Writes uint8 [tiles, 3, 448, 448] of uint8 [H, W, 3] into `out`."""
        height, width = picture.shape[:2]
        chw = picture.permute(2, 0, 1).to(self._dtype)

        def resized(rows: int, columns: int) -> torch.Tensor:
            shrunk = self.matrix(height, TILE * rows) @ chw
            whole = shrunk @ self.matrix(width, TILE * columns).mT
            whole = whole.add_(0.5).clamp_(0, 255)  # the copy below truncates
            return whole.view(3, rows, TILE, columns, TILE).permute(1, 3, 0, 2, 4)

        area = plan.rows * plan.columns
        out[:area].view(plan.rows, plan.columns, 3, TILE, TILE).copy_(resized(plan.rows, plan.columns))
        if plan.thumbnail:
            out[area:].view(1, 1, 3, TILE, TILE).copy_(resized(1, 1))


def random_gain(rng: random.Random) -> list[list[float]]:
    """Factors and offsets of a mild change of brightness and white balance, too small to change a colour's name."""
    contrast = rng.uniform(0.9, 1.1)
    factors = [contrast * rng.uniform(0.96, 1.04) for _ in range(3)]
    return [factors, [rng.uniform(-10, 10)] * 3]


def tile_windows(plan: Layout) -> list[tuple[float, float, float, float]]:
    """Each tile's (x0, y0, x1, y1) as fractions of the picture, in the order of `Cutter`."""
    c, r = plan.columns, plan.rows
    windows = [(x / c, y / r, (x + 1) / c, (y + 1) / r) for y in range(r) for x in range(c)]
    return windows + [(0.0, 0.0, 1.0, 1.0)] * plan.thumbnail


def patch_targets(boxes: torch.Tensor, windows: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What lies on each patch of each tile.

    boxes [tiles, boxes, 5]: class number (negative = padding) and x0, y0, x1, y1 as fractions of the tile's picture;
    windows [tiles, 4].  Returns bool [tiles, 16, 16, classes] twice (rows first): the class covers a quarter of the
    patch or has a quarter of its object there; an object's centre lies there.
    """
    size = (windows[:, 2:] - windows[:, :2])[:, None]
    low = (boxes[..., 1:3] - windows[:, None, :2]) / size * GRID
    high = (boxes[..., 3:5] - windows[:, None, :2]) / size * GRID
    edges = torch.arange(GRID, device=boxes.device, dtype=boxes.dtype)
    overlap = torch.minimum(high[..., None], edges + 1) - torch.maximum(low[..., None], edges)
    overlap = overlap.clamp_(min=0)  # [tiles, boxes, xy, 16]
    area = ((high - low).clamp(min=1e-6)).prod(-1).clamp(max=1.0)[..., None]
    centre = ((low + high) / 2).floor()[..., None] == edges
    kind = F.one_hot(boxes[..., 0].long().clamp(min=0), classes).to(boxes.dtype) * (boxes[..., :1] >= 0)
    covered = overlap[:, :, 1, :, None] * overlap[:, :, 0, None, :] >= 0.25 * area[..., None]
    centred = centre[:, :, 1, :, None] & centre[:, :, 0, None, :]

    def per_class(where: torch.Tensor) -> torch.Tensor:
        return torch.einsum("tbyx,tbc->tyxc", where.to(boxes.dtype), kind) > 0

    return per_class(covered), per_class(centred)
