"""Pictures of furnished rooms with hazards, drawn from parameters, with questions whose answers are known.

`sample(seed, split)` gives a `Scene`; `render` and `encode_jpeg` its picture; `questions`, `ask`, `describe` and
`boxes` its labels; `heldout()` the fixed held-out set.
"""

from .drawing import draw, fingerprint
from .heldout import HeldoutItem, heldout
from .parameters import HAZARDS, Scene
from .questions import KINDS, ORDINARY, Question, ask, boxes, describe, questions
from .renderer import encode_jpeg, render
from .sampler import sample

__all__ = [
    "HAZARDS",
    "KINDS",
    "ORDINARY",
    "HeldoutItem",
    "Question",
    "Scene",
    "ask",
    "boxes",
    "describe",
    "draw",
    "encode_jpeg",
    "fingerprint",
    "heldout",
    "questions",
    "render",
    "sample",
]
