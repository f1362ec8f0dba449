"""The language model's rope, as its section of config.json states it.

The rules are those of transformers' ``modeling_rope_utils.py`` and of its configuration classes: ``rope_scaling`` goes
before ``rope_parameters``, a section's own ``rope_theta`` before the one beside it. What transformers passes over with
a warning is refused by name here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tessera.checkpoint.files import check_number, one_of
from tessera.errors import CheckpointError

TRAINED = "original_max_position_embeddings"
_SECTIONS = ("rope_scaling", "rope_parameters")
# What each rule needs, and what it may have besides.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", TRAINED),
    "longrope": ("short_factor", "long_factor", TRAINED),
}
_OPTIONAL = {"longrope": ("factor", "attention_factor")}
_NAMES = {name for names in (*_NEEDED.values(), *_OPTIONAL.values()) for name in names}


class Rope(NamedTuple):
    """As TextConfig has them: the base, the rule with its settings (None: plain), the frequencies of each axis."""

    rope_theta: float
    rope_scaling: dict[str, Any] | None
    mrope_section: tuple[int, ...] | None


@dataclass(frozen=True)
class RopeReader:
    """For a body whose context is ``positions`` tokens; ``where`` begins each message.

    ``rules``: the rope types that the body has beside plain rope. ``axes``: the ``mrope_section`` of a body whose
    positions have several axes where none is stated. ``always``: the sections that mean plain rope where they are
    missing, as to code that looks there alone.
    """

    rules: Sequence[str]
    head_dim: int
    positions: int
    where: str
    axes: Sequence[int] | None = None
    always: Sequence[str] = ()
    interleaved: bool = False

    def read(self, section: Mapping[str, Any], root: Mapping[str, Any]) -> Rope:
        """The rope of the language model in ``section``.

        ``root``: all of config.json, whose own rope transformers passes over where ``section`` lies inside of it.
        Raises CheckpointError for a rope that is not supported or not understood, and for two that differ.
        """
        stated = {name: section.get(name) or {} for name in _SECTIONS if section.get(name) or name in self.always}
        stated = stated or {"rope_parameters": {}}
        found = {name: self._resolve(settings, section, name) for name, settings in stated.items()}
        for name in _SECTIONS:
            if root.get(name):
                outside = f"{name} outside of the text model's section"
                found[outside] = self._resolve(root[name], {**section, **root}, outside)
        first, *others = found
        for other in others:
            if found[other] != found[first]:
                raise CheckpointError(
                    f"{self.where}: {first} and {other} state two ropes that differ, {_shown(found[first])} and "
                    f"{_shown(found[other])}: keep the one that is meant, with its rope_theta, and delete the other"
                )
        return found[first]

    def _resolve(self, stated: Any, beside: Mapping[str, Any], name: str) -> Rope:
        """One section, ``stated``, with what stands ``beside`` it where it says nothing itself.

        Older savers call rope over several axes the type "mrope", newer ones "default" with an ``mrope_section``; older
        ones call longrope "su".
        """
        where, axes = f"{self.where}: {name}", self.axes
        if not isinstance(stated, Mapping):
            raise CheckpointError(f"{where} must be an object, not {stated!r:.80}")
        settings = {name: value for name, value in stated.items() if value is not None or name not in _NAMES}
        theta = settings.pop("rope_theta", beside.get("rope_theta", 10000.0))
        check_number(theta, f"{where}: rope_theta")
        rotated = settings.pop("partial_rotary_factor", beside.get("partial_rotary_factor"))
        one_of(1.0 if rotated is None else rotated, (1.0,), f"{where}: partial_rotary_factor")
        kind = settings.pop("rope_type", settings.pop("type", "default"))
        if axes is not None:
            kind = "default" if kind == "mrope" and not self.interleaved else kind
            axes = settings.pop("mrope_section", axes)
            _check_axes(axes, self.head_dim, where)
            if self.interleaved:  # transformers passes over what is stated
                one_of(settings.pop("mrope_interleaved", True), (True,), f"{where}: mrope_interleaved")
        renamed = kind == "su" and "longrope" in self.rules
        kind = "longrope" if renamed else kind
        beside_axes = "beside mrope_section, " if axes else ""
        one_of(kind, ("default", *(() if axes else self.rules)), f"{where}: {beside_axes}rope type")
        if TRAINED in _NEEDED[kind]:
            trained = 4096 if kind == "longrope" else settings.get(TRAINED, self.positions)
            trained = beside.get(TRAINED, trained)
            if not renamed:  # transformers wants it inside of the section where the old name is used
                settings.setdefault(TRAINED, trained)
            one_of(settings.get(TRAINED, trained), (trained,), f"{where}: the rope's {TRAINED}")
        known = (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))
        for name in settings:
            if name not in known:
                raise CheckpointError(
                    f"{where}: {name!r} is no setting of rope type {kind!r}, which has "
                    f"{', '.join(('rope_theta', *known, *(('mrope_section',) if axes else ())))}"
                )
        for name in _NEEDED[kind]:
            if name not in settings:
                raise CheckpointError(f"{where}: rope type {kind!r} needs the setting {name!r}")
        _check_values(settings, self.head_dim, where)
        scaling = None if kind == "default" else {"rope_type": kind, **settings}
        return Rope(float(theta), scaling, None if axes is None else tuple(axes))


def _shown(rope: Rope) -> str:
    settings = {"rope_type": "default", **(rope.rope_scaling or {}), "rope_theta": rope.rope_theta}
    return f"{settings | ({'mrope_section': rope.mrope_section} if rope.mrope_section else {})!r:.300}"


def _check_axes(axes: Any, head_dim: int, where: str) -> None:
    if not isinstance(axes, list) or not all(type(size) is int for size in axes) or sum(axes) != head_dim // 2:
        raise CheckpointError(
            f"{where}: mrope_section {axes!r:.50} must be whole numbers that sum to half the head size, {head_dim // 2}"
        )


def _check_values(settings: Mapping[str, Any], head_dim: int, where: str) -> None:
    for name, value in settings.items():
        if not name.endswith(("short_factor", "long_factor")):
            check_number(value, f"{where}: {name}")
        elif not isinstance(value, list) or len(value) != head_dim // 2:
            raise CheckpointError(f"{where}: {name} must be {head_dim // 2} numbers, half the head size")
        else:
            for number in value:
                check_number(number, f"{where}: {name}")
    low, high = (settings.get(f"{name}_freq_factor", number) for name, number in (("low", 0.0), ("high", 1.0)))
    if high <= low:
        raise CheckpointError(f"{where}: high_freq_factor {high} must be greater than low_freq_factor {low}")
