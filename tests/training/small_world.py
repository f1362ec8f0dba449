"""A world of one class for the training on rooms: a red square that is there or not."""

import random
from types import SimpleNamespace

import cv2
import numpy as np


class Rooms:
    HAZARDS = ("square",)

    @staticmethod
    def sample(seed: int, split: str) -> SimpleNamespace:
        rng = random.Random(f"{split}/{seed}")
        return SimpleNamespace(
            there=rng.random() < 0.5, x=rng.randrange(20, 60), size=rng.choice([(90, 90), (120, 80)])
        )

    @staticmethod
    def encode_jpeg(drawn: SimpleNamespace) -> bytes:
        width, height = drawn.size
        pixels = np.full((height, width, 3), 200, np.uint8)
        if drawn.there:
            pixels[20:50, drawn.x : drawn.x + 30] = (20, 20, 220)
        return cv2.imencode(".jpg", pixels)[1].tobytes()

    @staticmethod
    def boxes(drawn: SimpleNamespace) -> list[tuple[str, float, float, float, float]]:
        return [("square", drawn.x, 20, drawn.x + 30, 50)] if drawn.there else []

    @staticmethod
    def questions(drawn: SimpleNamespace) -> list[SimpleNamespace]:
        answer = "yes" if drawn.there else "no"
        return [SimpleNamespace(text="Is there a square?", answer=answer, kind="presence", cls="square")]
