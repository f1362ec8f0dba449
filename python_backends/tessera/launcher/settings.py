"""All settings of one server as they are in force, before it is started: from `--set` down to the defaults.

How much of /dev/shm a server takes: each Python process of it has a region there, which grows and never shrinks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tessera.checkpoint.files import find_checkpoint, is_name
from tessera.errors import ConfigError
from tessera.models.registry import vision_tensors
from tessera.settings import schema
from tessera.settings.gpu import (
    Division,
    ServerSettings,
    card_bytes,
    divide_for,
    find_device,
    refuse_limit,
    why_no_gpu,
)
from tessera.settings.schema import Effective, Sources, settings_of, variable
from tessera.settings.stages import LANGUAGE, PREPROCESS, STAGES, VISION, refuse_unknown
from tessera_wire.command_line import nearest

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig


INSTANCES = "TESSERA_PREPROCESS_INSTANCES"


@dataclass(frozen=True)
class InstanceSettings:
    """How many processes prepare pictures, each on one thread; for the launcher, which writes it into config.pbtxt."""

    instances: int = schema.setting(2, cuda=max(1, min(8, len(os.sched_getaffinity(0)) // 2)), least=1)


@dataclass
class ServerSetup:
    """What one server is started with. ``division`` is None without a GPU, or where the driver does not say its size;
    ``instances`` of preprocess differ from config.pbtxt's, or are None; ``stages``: our own stages' settings;
    ``processes``: how many Python models run, each instance in one."""

    environment: dict[str, str]
    effective: list[Effective]
    device: str
    division: Division | None = None
    instances: int | None = None
    stages: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    processes: int = 0


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """What ``--set`` says, as the environment that tells it to the stages. Raises ConfigError for unknown names."""
    known = {entry.name: variable("", entry) for entry in settings_of(ServerSettings)}
    for stage, kind in STAGES.items():
        own = [*settings_of(kind), *(settings_of(InstanceSettings) if stage == PREPROCESS else ())]
        known |= {e.name if e.common else f"{stage}.{e.name}": variable(stage, e) for e in own}
    for name in given:
        if name not in known:
            common = name.partition(".")[2]
            hint = f"; it is one for all stages: {common}" if common in known else nearest(name, known)
            raise ConfigError(f"--set {name}: there is no such setting{hint}")
    return {known[name]: value for name, value in given.items()}


def set_up(
    repository: Path,
    config_name: str | None,
    environment: Mapping[str, str],
    given: Mapping[str, str],
    only: tuple[str, ...] = (),
) -> ServerSetup:
    """Settles the settings of the stages that the repository has.

    Args:
        config_name: of the named configs that are used instead of config.pbtxt.
        environment: of the server.
        given: settings by name, which win.
        only: the models that are loaded; empty for all.

    Raises:
        ConfigError: a setting is unknown or has a value that it cannot have; the GPU is too small.
    """
    told = variables(given)
    known = {path.parent.name for path in repository.glob("*/config.pbtxt")}
    for name in set(only) - known:
        raise ConfigError(f"--only {name}: there is no such model{nearest(name, known)}")
    configs = {name: read_config(config_file(repository, name, config_name)) for name in sorted(set(only) or known)}
    kinds = {stage: kind for stage, kind in STAGES.items() if stage in configs}
    all_told = {**environment, **told}
    counted = {INSTANCES: count} if (count := all_told.pop(INSTANCES, None)) else {}
    sources = {stage: Sources(stage, parameters(configs[stage]), all_told) for stage in kinds}
    found: dict[str, Effective] = {}

    def report(effective: Effective) -> None:
        if effective.name in given:
            effective = effective._replace(origin="command line")
        other = found.setdefault(effective.name, effective)
        if other.value != effective.value and "config.pbtxt" in (other.origin, effective.origin):
            raise ConfigError(
                f"{effective.name} is {other.value} for one stage and {effective.value} for another, but one for all: "
                f"set it by --set {effective.name}=VALUE, or in every stage's config.pbtxt"
            )

    first = next(iter(sources.values()), Sources("", {}, all_told))
    server = schema.read(ServerSettings, first, "", report=report)
    here = find_device(all_told)
    device = here if server.device == "auto" else server.device
    if (server.device, here) == ("cuda", "cpu"):
        raise ConfigError(f"device is cuda, but {why_no_gpu(all_told)}")
    if device == "cuda":
        refuse_limit(all_told)
    checkpoint = repository / server.checkpoint
    if is_name(server.checkpoint):  # a folder that is missing is reported when it is read
        checkpoint = find_checkpoint(server.checkpoint, all_told, repository)
    division = None
    if device == "cuda" and {VISION, LANGUAGE} & kinds.keys() and (card := card_bytes(all_told)):
        division = divide_for(card, server, checkpoint, first, LANGUAGE in kinds, vision_tensors(checkpoint))
    instances, stages = None, {}
    for stage, kind in kinds.items():
        refuse_unknown(sources[stage], kind, ServerSettings)
        schema.read(ServerSettings, sources[stage], "", report=report)
        values: Any = schema.read(kind, sources[stage], device, lambda: division, report)
        if configs[stage].backend == "python":  # a plan of TensorRT reads no checkpoint
            stages[stage] = values
        elif values.deterministic:
            raise ConfigError(f"deterministic is on, and a plan of TensorRT ({stage}) does not keep bits: turn it off")
    found["checkpoint"] = found["checkpoint"]._replace(value=checkpoint.resolve())
    if server.device == "auto":
        found["device"] = Effective("device", device, "device")
    processes = {
        name: sum(group.count or 1 for group in config.instance_group) or 1
        for name, config in configs.items()
        if config.backend == "python"
    }
    if PREPROCESS in kinds:
        stated = configs[PREPROCESS].instance_group[0].count
        said = {"instances": str(stated)} if stated != InstanceSettings.instances else {}
        own = schema.read(InstanceSettings, Sources(PREPROCESS, said, counted), device, report=report)
        instances = own.instances if own.instances != stated else None
        processes[PREPROCESS] = own.instances
    environment = told | {"TESSERA_DEVICE": device}
    running = sum(processes.values())
    return ServerSetup(environment, list(found.values()), device, division, instances, stages, only, running)


def config_file(repository: Path, model: str, config_name: str | None) -> Path:
    named = repository / model / "configs" / f"{config_name}.pbtxt"
    return named if config_name and named.is_file() else repository / model / "config.pbtxt"


def read_config(file: Path) -> ModelConfig:
    """Raises ConfigError for a file that tritonserver could not read either."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(file.read_text("utf-8"), model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{file}: {error}") from None


def parameters(config: ModelConfig) -> dict[str, str]:
    return {name: value.string_value for name, value in config.parameters.items()}


def lay_out(repository: Path, config_name: str | None, setup: ServerSetup, folder: Path) -> Path:
    """The repository that tritonserver is to load: the given one, or in ``folder`` one of links to it that has the
    models and the instances of ``setup``, neither of which tritonserver takes by a flag."""
    if setup.instances is None and not setup.only:
        return repository
    for model in sorted(repository.resolve().iterdir()):
        if not (model / "config.pbtxt").is_file() or (setup.only and model.name not in setup.only):
            continue
        own = folder / model.name
        own.mkdir(parents=True)
        for entry in model.iterdir():
            if entry.name == "configs":
                shutil.copytree(entry, own / "configs")
            elif entry.name == "config.pbtxt":
                shutil.copyfile(entry, own / entry.name)  # writable, whatever the original is
            else:
                (own / entry.name).symlink_to(entry)
        if model.name == PREPROCESS and setup.instances is not None:
            file = config_file(folder, PREPROCESS, config_name)
            config = read_config(file)
            config.instance_group[0].count = setup.instances
            file.write_text(str(config))
    return folder


SHARED_MEMORY = Path("/dev/shm")
MB = 1 << 20
ROOM = 2048 * MB  # for the pictures of some dozens of requests


class Region(NamedTuple):
    """Bytes of /dev/shm of one process: at its start, and those that it grows by."""

    start: int
    growth: int


# A larger start saves growing at the first big picture; a small /dev/shm (64 MB is Docker's default) must still hold
# the regions of all processes after their first growth.
ROOMY, MODEST = Region(64 * MB, 32 * MB), Region(1 * MB, 1 * MB)


def regions(processes: int, servers: int = 1) -> tuple[Region, str | None]:
    """What each region is to have, by what is free now and shared by the servers that start; and a line for the user
    where that is less than it should be.

    Raises ConfigError where they do not fit at all.
    """
    free, count = shutil.disk_usage(SHARED_MEMORY).free, servers * processes
    least, wanted = count * sum(MODEST), max(servers * ROOM, count * sum(ROOMY))
    said = f"{SHARED_MEMORY} has {free // MB} MB free, and"
    remedy = f"enlarge it (docker run --shm-size={2 * servers}g)"
    if free < least:
        raise ConfigError(f"{said} the {count} Python processes need at least {least // MB} MB there; {remedy}")
    if free >= wanted:
        return ROOMY, None
    return MODEST, (
        f"{said} {count} Python processes should have {wanted // MB} MB there: they begin with {MODEST.start // MB} MB "
        f"each, and what finds no more is refused as UNAVAILABLE; {remedy}"
    )
