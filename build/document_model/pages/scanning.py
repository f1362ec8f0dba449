"""What a printer and a scanner do to a page: a slight turn, blur, grain, grey levels, a JPEG file."""

import math
from random import Random

import cv2
import numpy as np

from pages.page import Box, Page

MOST_DEGREES = 0.5


def _moved_box(box: Box, turn: np.ndarray) -> Box:
    left, top, right, bottom = box
    corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom)]) @ turn[:, :2].T + turn[:, 2]
    (x0, y0), (x1, y1) = corners.min(0), corners.max(0)
    return float(x0), float(y0), float(x1), float(y1)


def turned(page: Page, degrees: float) -> Page:
    """The page turned about its middle, boxes and glyphs with it."""
    height, width = page.picture.shape
    turn = cv2.getRotationMatrix2D((width / 2, height / 2), degrees, 1.0)
    page.picture = cv2.warpAffine(page.picture, turn, (width, height), flags=cv2.INTER_LINEAR, borderValue=255)
    for block in page.blocks:
        block.box = _moved_box(block.box, turn)
        block.places = (block.places @ turn[:, :2].T + turn[:, 2]).astype(np.float32)
    return page


def scanned(page: Page, dice: Random) -> Page:
    """A third of the pages stay as they were drawn."""
    if dice.random() < 0.33:
        return page
    if dice.random() < 0.35:
        page = turned(page, dice.uniform(-MOST_DEGREES, MOST_DEGREES))
    picture = page.picture
    if dice.random() < 0.4:
        picture = cv2.GaussianBlur(picture, (0, 0), dice.uniform(0.4, 1.0))
    black, white, bend = dice.uniform(0, 70), dice.uniform(215, 255), math.exp(dice.uniform(-0.4, 0.4))
    picture = cv2.LUT(picture, (black + (white - black) * (np.arange(256) / 255) ** bend).astype(np.uint8))
    if dice.random() < 0.35:
        grain = np.random.default_rng(dice.randrange(2**32)).normal(0, dice.uniform(1, 9), (256, 256)).astype(np.int16)
        height, width = picture.shape
        tiled = np.tile(grain, (-(-height // 256), -(-width // 256)))[:height, :width]
        picture = np.clip(picture + tiled, 0, 255).astype(np.uint8)
    if dice.random() < 0.5:
        _, file = cv2.imencode(".jpg", picture, (cv2.IMWRITE_JPEG_QUALITY, dice.randint(45, 95)))
        picture = cv2.imdecode(file, cv2.IMREAD_GRAYSCALE)
    page.picture = picture
    return page
