"""What may be set, where, and what is taken where nobody sets it.

The stages' dataclasses are the one home of defaults: a field made by :func:`setting` may be set by its name in the
stage's config.pbtxt, in the environment, or on the launcher's command line, and says what each device takes otherwise.
A setting of one stage is ``TESSERA_<STAGE>_<NAME>`` in the environment and ``stage.name`` elsewhere; one of all stages
is ``TESSERA_<NAME>`` and ``name``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

from tessera.errors import ConfigError

Settings = TypeVar("Settings")

QUANTIZATIONS = {
    "checkpoint": ("checkpoint", "checkpoint"),
    "fp8": ("fp8", "fp8"),
    "fp8-language": ("checkpoint", "fp8"),
    "fp8-vision": ("fp8", "checkpoint"),
    "int8-vision": ("int8", "checkpoint"),
}
"""What `quantization` says -> what that is for the vision stage, and for the language model."""
SWITCH = {"off": False, "on": True}


@dataclass(frozen=True)
class Setting:
    """How one field of a dataclass may be set.

    ``default``: for callers that construct the dataclass directly, and on a device for which nothing else is said.
    ``cpu`` and ``cuda``: a stage's default there. ``kind`` makes a value of text; without one the default's own
    type does. ``name``: where it is not the field's. ``common``: one for all stages. ``settable``: False for what
    has a range, but is no user's to set. ``choices``: all that are allowed, with the value of each. ``share``: the
    part of a GPU's division that a size of 0 stands for on a GPU. ``divides``: the other stages divide a GPU by it
    too, and none of them reads this one's config.pbtxt.
    """

    default: Any
    cpu: Any = None
    cuda: Any = None
    kind: Callable[[str], Any] | None = None
    name: str = ""
    common: bool = False
    settable: bool = True
    least: float | None = None
    most: float | None = None
    choices: Mapping[str, Any] = field(default_factory=dict)
    share: str = ""
    divides: bool = False

    def parse(self, title: str, text: str) -> Any:
        """The value that ``text`` says. Raises ConfigError with what is allowed."""
        if self.default is None and text in ("", "0"):
            return None
        kind = self.kind or type(self.default)
        try:
            value = self.choices.get(text, text) if self.choices else kind(text)
        except ValueError:
            number = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{title} is {text!r}; it must be {number}") from None
        self.check(title, value)
        return value

    def check(self, title: str, value: Any) -> None:
        """Raises ConfigError for a value that is out of range or not among the choices."""
        if self.choices and value not in self.choices.values():
            raise ConfigError(f"{title} is {value!r}; it must be one of {', '.join(self.choices)}")
        if self.least is not None and value is not None and not value >= self.least:
            raise ConfigError(f"{title} is {value}; it must be at least {self.least}")
        if self.most is not None and not value <= self.most:
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


def setting(default: Any, choices: Iterable[str] | Mapping[str, Any] = (), **about: Any) -> Any:
    """A dataclass field that may be set; ``about`` as in :class:`Setting`. Choices may stand for themselves."""
    values = choices if isinstance(choices, Mapping) else {text: text for text in choices}
    return field(default=default, metadata={"setting": Setting(default, choices=values, **about)})


def settings_of(kind: type) -> Iterator[Setting]:
    """All that may be set in a dataclass."""
    return (entry for _, entry in _own(kind) if entry.settable)


def check(instance: Any, title: str) -> None:
    """Every field in its range; else ConfigError, which begins with ``title``."""
    for name, entry in _own(type(instance)):
        entry.check(f"{title}: {entry.name}", getattr(instance, name))


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
    for name, entry in _own(kind):
        full = entry.name if entry.common else f"{sources.stage}.{entry.name}"
        found = sources.find(entry) if entry.settable else None
        if found is not None:
            value, origin = entry.parse(full.replace(".", ": "), found[0]), found[1]
            if entry.divides and value and (device, origin) == ("cuda", "config.pbtxt"):
                raise ConfigError(
                    f"{full} is set in config.pbtxt, where the other stages, which divide the GPU by it too, do not "
                    f"see it: set it by --set {full}=VALUE or {variable(sources.stage, entry)}"
                )
        else:
            own = getattr(entry, device, None)
            value, origin = (entry.default, "default") if own is None else (own, "device")
        if entry.share and not value and device == "cuda" and (shares := division()) is not None:
            value, origin = getattr(shares, entry.share), "device"
        values[name] = value
        if entry.settable:
            texts = {value: text for text, value in reversed([*entry.choices.items()])}
            shown = found[0] if found and entry.choices else texts.get(value, value)
            report(Effective(full, shown, origin))
    if any(each.name == "device" for each in fields(kind)):  # type: ignore[arg-type]
        values.setdefault("device", device)
    return kind(**values)


def variable(stage: str, setting: Setting) -> str:
    """Its name in the environment."""
    return f"TESSERA_{setting.name}".upper() if setting.common else f"TESSERA_{stage}_{setting.name}".upper()


def _own(kind: Any) -> Iterator[tuple[str, Setting]]:
    """Names and settings of the fields."""
    for each in fields(kind):
        if entry := each.metadata.get("setting"):
            yield each.name, entry if entry.name else replace(entry, name=each.name)
