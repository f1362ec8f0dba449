"""Which scheme each module of a checkpoint has: what config.json states, and what the file's tensors show.

Published files forget to list modules that they did not convert, and write names with other prefixes. So where there
are tensors they decide, module by module, and the configuration says how they are to be read.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pkgutil import resolve_name
from typing import Any

from tessera.checkpoint.weights import listed
from tessera.errors import CheckpointError
from tessera.linear.formats import Groups, Settings
from tessera.linear.formats.fp8 import Fp8OnLoad
from tessera.linear.scheme import LinearScheme, SchemeSelector
from tessera.linear.unquantized import Unquantized

#: quant_method -> its reader: (settings, from which it takes all that it understands) -> Groups
METHODS = {
    "awq": "tessera.linear.formats.gptq:read_awq",
    "gptq": "tessera.linear.formats.gptq:read_gptq",
    "compressed-tensors": "tessera.linear.formats.compressed:read",
    "fp8": "tessera.linear.formats.fp8:read_blocks",
    "modelopt": "tessera.linear.formats.fp8:read_modelopt",
}
_FLOATS = ("F64", "F32", "BF16", "F16")
#: what each method calls the modules that it leaves alone
_IGNORE = ("ignore", "modules_to_not_convert", "exclude_modules")
_HEADS = ("lm_head", "output")

#: module -> its tensors' names after the module's name -> their dtypes as safetensors calls them
StoredModules = Mapping[str, Mapping[str, str]]


def scheme_selector(
    quantization: Mapping[str, Any] | None,
    stored: StoredModules | None = None,
    on_load: str = "checkpoint",
    told: Callable[[str], str] = str,
) -> SchemeSelector:
    """From a checkpoint's quantization_config, and its text model's tensors if it has any, to the layers' schemes.

    Raises CheckpointError for a method or a setting that is not supported. The selector makes a new scheme for each
    layer, and raises CheckpointError naming a module whose tensors are not what it should have. ``on_load`` "fp8":
    an unquantized checkpoint's layers, but not the head, are quantized while they are read. ``told``: what messages
    call a module.
    """
    if on_load == "fp8":
        if quantization is not None:
            raise CheckpointError(
                f"quantization is fp8, but the checkpoint is quantized already ({quantization.get('quant_method')}); "
                'set it to "checkpoint"'
            )
        return lambda modules: Unquantized() if set(modules) & set(_HEADS) else Fp8OnLoad()
    groups, ignored = _read(quantization)
    method = "" if quantization is None else quantization["quant_method"]
    return _Selector(groups, ignored, stored or {}, method, told)


def stored_modules(names: Mapping[str, str], dtype: Callable[[str], str]) -> StoredModules:
    """``names``: stored name -> ours; ``dtype`` tells a stored tensor's."""
    modules: dict[str, dict[str, str]] = {}
    for stored, ours in names.items():
        module, _, leaf = ours.rpartition(".")
        modules.setdefault(module, {})[leaf] = dtype(stored)
    return modules


def _read(quantization: Mapping[str, Any] | None) -> tuple[Groups, list[str]]:
    if quantization is None:
        return [], []
    settings = Settings(quantization)
    method = settings.take("quant_method", METHODS)
    ignored = [name for key in _IGNORE for name in settings.take(key) or ()]
    if not settings.take("lm_head", (True, False), False) and method != "compressed-tensors":
        ignored += _HEADS
    groups: Groups = resolve_name(METHODS[method])(settings)
    settings.finish()
    for _, make in groups:
        make()  # raises for values that no module could have
    return groups, ignored


@dataclass(frozen=True)
class _Selector:
    """A SchemeSelector: by a configuration's groups, the modules that it leaves out, and the tensors of the file."""

    groups: Groups
    ignored: Sequence[str]
    stored: StoredModules
    method: str
    told: Callable[[str], str]

    def __call__(self, modules: Collection[str]) -> LinearScheme:
        found = {module: self._group(module) for module in modules}
        firsts: dict[int | None, str] = {}
        for module, group in found.items():
            firsts.setdefault(group, module)  # of hundreds of experts one of each kind is told
        if len(firsts) > 1:
            told = ", ".join(
                f"{self.told(module)}: {'not quantized' if group is None else f'{self.method}, group {group}'}"
                for group, module in firsts.items()
            )
            raise CheckpointError(f"modules that run as one layer must be quantized alike, which these are not: {told}")
        group = next(iter(found.values()))
        return Unquantized() if group is None else self.groups[group][1]()

    def _group(self, module: str) -> int | None:
        """The group that a module is quantized with; None for no quantization."""
        targeted = self._targeted(module)
        tensors = self.stored.get(module)
        if tensors is None:  # random weights, or it will be missed
            return None if any(_matches(module, name) for name in self.ignored) else targeted
        if tensors.keys() <= {"weight", "bias"} and tensors.get("weight", "F32") in _FLOATS:
            return None
        held = listed(f"{leaf} {dtype}" for leaf, dtype in tensors.items())
        if targeted is None:
            why = (
                "no group of quantization_config names it" if self.method else "config.json has no quantization_config"
            )
            raise CheckpointError(f"module {self.told(module)} holds {held}, but {why}")
        scheme = self.groups[targeted][1]()
        required = scheme.leaves() | ({"bias"} & tensors.keys())
        if not required <= tensors.keys() <= required | scheme.optional:
            raise CheckpointError(
                f"module {self.told(module)} holds {held}: neither an unquantized weight nor what {self.method} "
                f"is read from, {listed(required)}"
            )
        return targeted

    def _targeted(self, module: str) -> int | None:
        """The group with the most specific target: a name, a pattern, all linear layers."""
        found = (
            (target == "Linear", target.startswith("re:"), number)
            for number, (targets, _) in enumerate(self.groups)
            for target in targets
            if target == "Linear" or _matches(module, target)
        )
        return min(found, default=(False, False, None))[2]


def _matches(module: str, pattern: str) -> bool:
    """Whether a pattern of a configuration means the module, whichever prefix the module had where it was written.

    "re:" begins a regular expression for the beginning of the name (as compressed-tensors defines it), "*" is
    ModelOpt's wildcard; anything else is the name of the module, or of what it is in.
    """
    short = module.removeprefix("model.")
    names = {module, short, *(f"{prefix}{name}" for prefix in _PREFIXES for name in (module, short))}
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in names)
    if "*" in pattern:
        return any(fnmatchcase(name, pattern) for name in names)
    return any(f".{pattern}." in f".{name}." for name in names)


_PREFIXES = ("language_model.", "model.language_model.")
