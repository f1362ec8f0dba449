"""What may be set, where, and what is taken where nobody sets it.

The stages' dataclasses are the one home of defaults: a field made by :func:`setting` may be set by its name in the
stage's config.pbtxt, in the environment, or on the launcher's command line, and says what each device takes otherwise.
A setting of one stage is ``TESSERA_<STAGE>_<NAME>`` in the environment and ``stage.name`` elsewhere; one of all stages
is ``TESSERA_<NAME>`` and ``name``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

from tessera.errors import ConfigError

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Setting:
    """How one field may be set. ``share`` names the part of a GPU's division that a size of 0 takes on a GPU."""

    default: Any
    devices: Mapping[str, Any]
    kind: Callable[[str], Any]
    name: str
    common: bool
    least: float | None
    most: float | None
    choices: Mapping[str, Any] | None
    share: str

    def parse(self, title: str, text: str) -> Any:
        """The value that ``text`` says. Raises ConfigError with what is allowed."""
        if self.default is None and text in ("", "0"):
            return None
        try:
            value = self.choices[text] if self.choices else self.kind(text)
        except (KeyError, ValueError):
            what = {int: "a whole number", float: "a number"}.get(self.kind, "")  # type: ignore[call-overload]
            allowed = f"one of {', '.join(self.choices)}" if self.choices else what
            raise ConfigError(f"{title} is {text!r}; it must be {allowed}") from None
        self.check(title, value)
        return value

    def check(self, title: str, value: Any) -> None:
        """Raises ConfigError for a value that is out of range or not among the choices."""
        if self.choices and value not in self.choices.values():
            raise ConfigError(f"{title} is {value!r}; it must be one of {', '.join(self.choices)}")
        if self.least is not None and value is not None and value < self.least:
            raise ConfigError(f"{title} is {value}; it must be at least {self.least}")
        if self.most is not None and value > self.most:
            raise ConfigError(f"{title} is {value}; it must be at most {self.most}")


class Effective(NamedTuple):
    """A setting as it is in force: ``origin`` is default, device, config.pbtxt, environment or command line."""

    name: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Sources:
    """Who may set the settings of one stage: the environment before config.pbtxt's parameters."""

    stage: str
    parameters: Mapping[str, str]
    environment: Mapping[str, str]

    def find(self, setting: Setting) -> tuple[str, str] | None:
        """(text, origin) of what is set."""
        if (text := self.environment.get(variable(self.stage, setting))) is not None:
            return text, "environment"
        text = self.parameters.get(setting.name)
        return None if text is None else (text, "config.pbtxt")

    def refuse_unknown(self, *kinds: type) -> None:
        """Raises ConfigError for a parameter, or a variable of this stage, that none of these dataclasses has."""
        known = {each.name: each for kind in kinds for each in settings_of(kind)}
        own = f"TESSERA_{self.stage.upper()}_"
        variables = {variable(self.stage, each) for each in known.values()}
        for name in self.parameters:
            # The Python backend's own parameters are in capitals.
            if name not in known and not name.isupper():
                raise ConfigError(f"{self.stage}/config.pbtxt: unknown parameter {name!r}" + nearest(name, known))
        for name in self.environment:
            if name.startswith(own) and name not in variables:
                raise ConfigError(f"unknown environment variable {name}" + nearest(name, variables))


def setting(
    default: Any,
    *,
    cpu: Any = None,
    cuda: Any = None,
    kind: Callable[[str], Any] | None = None,
    name: str = "",
    common: bool = False,
    settable: bool = True,
    least: float | None = None,
    most: float | None = None,
    choices: Iterable[str] | Mapping[str, Any] | None = None,
    share: str = "",
) -> Any:
    """A dataclass field that may be set.

    Args:
        default: for who builds the dataclass himself, and on a device for which nothing else is said.
        cpu: default of a stage on the CPU.
        cuda: default of a stage on a GPU.
        kind: makes a value of text; the default's own type where it is left out.
        name: where it is not the field's.
        common: one for all stages.
        settable: False for what has a range and a default for each device, but is no user's to set.
        choices: all that are allowed; a mapping gives the value of each.
        share: see :class:`Setting`.
    """
    chosen = choices if isinstance(choices, Mapping) or choices is None else {text: text for text in choices}
    devices = {device: value for device, value in (("cpu", cpu), ("cuda", cuda)) if value is not None}
    made = Setting(default, devices, kind or type(default), name, common, least, most, chosen, share)
    return field(default=default, metadata={"setting": made, "settable": settable})


def settings_of(kind: type) -> Iterator[Setting]:
    """All that may be set in a dataclass, those within its fields included."""
    for _, each, settable in _walk(kind):
        if settable:
            yield each


def check(instance: Any, title: str) -> None:
    """For ``__post_init__``: every field in its range. Raises ConfigError that begins with ``title``."""
    for name, each, _ in _walk(type(instance)):
        if hasattr(instance, name):
            each.check(f"{title}: {each.name}", getattr(instance, name))


def read(
    kind: type[Settings],
    sources: Sources,
    device: str,
    division: Callable[[], Any] = lambda: None,
    report: Callable[[Effective], None] = lambda effective: None,
) -> Settings:
    """An instance of the dataclass as it is set, its field ``device`` included.

    Args:
        device: cpu or cuda.
        division: gives the shares of the GPU; asked where one is needed.
        report: is told each setting as it is in force.
    """
    values: dict[str, Any] = {}
    for each in fields(kind):  # type: ignore[arg-type]
        if each.name == "device" and "setting" not in each.metadata:
            values["device"] = device
        elif is_dataclass(each.default_factory):
            values[each.name] = read(each.default_factory, sources, device, division, report)
        elif "setting" in each.metadata:
            entry = named(each)
            title = entry.name if entry.common else f"{sources.stage}: {entry.name}"
            found = sources.find(entry) if each.metadata["settable"] else None
            if found is not None:
                value, origin = entry.parse(title, found[0]), found[1]
            elif device in entry.devices:
                value, origin = entry.devices[device], "device"
            else:
                value, origin = entry.default, "default"
            if entry.share and not value and device == "cuda" and (shares := division()) is not None:
                value, origin = getattr(shares, entry.share), "device"
            values[each.name] = value
            if each.metadata["settable"]:
                texts = {value: text for text, value in entry.choices.items()} if entry.choices else {}
                full = entry.name if entry.common else f"{sources.stage}.{entry.name}"
                report(Effective(full, texts.get(value, value), origin))
    return kind(**values)


def named(each: Any) -> Setting:
    """The setting of a dataclass's field, which gives it its name."""
    made: Setting = each.metadata["setting"]
    return made if made.name else replace(made, name=each.name)


def variable(stage: str, setting: Setting) -> str:
    """Its name in the environment."""
    return f"TESSERA_{setting.name}".upper() if setting.common else f"TESSERA_{stage}_{setting.name}".upper()


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a refusal: what may have been meant, else all there is."""
    names = list(known)
    close = difflib.get_close_matches(name, names, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(names))}"


def _walk(kind: Any) -> Iterator[tuple[str, Setting, bool]]:
    for each in fields(kind):
        if is_dataclass(each.default_factory):
            yield from _walk(each.default_factory)
        elif "setting" in each.metadata:
            yield each.name, named(each), each.metadata["settable"]
