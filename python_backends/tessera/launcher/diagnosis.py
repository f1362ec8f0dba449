"""Why a server did not start: what its model repository lacks, and what its log says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tessera.errors import ConfigError
from tessera.launcher.settings import config_file, read_config
from tessera.launcher.shared_memory import SHARED_MEMORY

FAILED_MODEL = re.compile(r"failed to load '([^']+)' version \d+: (?:\w+(?: \w+)?: )?(.*)")
MISSING_FILE = re.compile(r"Failed to preinitialize Python stub: (.*'([^']*?)/\d+/[^/']+'.*)")
POLL_FAILED = re.compile(r"Poll failed for model directory '([^']+)': (.*)")
LOCATION = re.compile(r"\bAt:\s*(\S+\(\d+\): \S+)")
SHARED_MEMORY_FULL = re.compile(r"(?:initialize shared memory key|increase the shared memory pool size)")
IN_USE = re.compile(r"failed to start (\w+) service: .*Socket '([^']+)' already in use")
FAULT = re.compile(r'^(?:error: |E\d{4} \S+ \d+ \S+\] (?="failed))')


def check_repository(repository: Path, config_name: str | None = None) -> None:
    """Raises ConfigError for a repository without models, or a Python model without its file.

    The second is checked because tritonserver 2.51 does not report it: it hangs in its start.
    """
    if not repository.is_dir():
        raise ConfigError(f"no model repository: {repository} is not a folder (--model-repository)")
    models = sorted(path for path in repository.iterdir() if (path / "config.pbtxt").is_file())
    if not models:
        raise ConfigError(f"no models in {repository}: a model is a folder with a config.pbtxt (--model-repository)")
    for model in models:
        config = read_config(config_file(repository, model.name, config_name))
        if config.backend != "python":
            continue
        name = config.default_model_filename or "model.py"
        versions = [path for path in model.iterdir() if path.is_dir() and path.name.isdigit()]
        if not versions:
            raise ConfigError(f"model {model.name!r} has no version: make the folder {model / '1'} with {name} in it")
        for version in versions:
            if not (version / name).is_file():
                raise ConfigError(f"model {model.name!r} has no model file: {version / name} is missing")


def failed_models(log: str) -> dict[str, str]:
    """Model name -> one-line reason, for every model that the log says failed to load."""
    found: dict[str, str] = {}
    for line in log.splitlines():
        if match := FAILED_MODEL.search(line):
            found[match.group(1)] = one_line(match.group(2))
        elif match := MISSING_FILE.search(line):
            found[Path(match.group(2)).name] = one_line(match.group(1))
        elif match := POLL_FAILED.search(line):
            found[Path(match.group(1)).name] = one_line(match.group(2))
    return found


def explain_log(log: str) -> str | None:
    """One line that says why the server with this log failed, or None if the log does not show it."""
    if SHARED_MEMORY_FULL.search(log):
        free = shutil.disk_usage(SHARED_MEMORY).free >> 20
        return (
            f"shared memory is too small: {SHARED_MEMORY} has {free} MB free and each Python process needs its "
            "region there; enlarge it (docker run --shm-size=2g)"
        )
    if match := IN_USE.search(log):
        return f"{match.group(2)} is already in use ({match.group(1)} service)"
    if models := failed_models(log):
        return "; ".join(f"model {name!r} failed to load: {reason}" for name, reason in models.items())
    faults = [line for line in log.splitlines() if FAULT.match(line)]
    # tritonserver's last word ("creating server: ... failed") says less than the error logged before it.
    for line in sorted(faults, key=lambda line: line.startswith("error: ")):
        return one_line(FAULT.sub("", line))
    for line in log.splitlines():
        if "unrecognized option" in line or "error while loading shared libraries" in line:
            return line.strip()
    return None


def one_line(reason: str) -> str:
    """A logged message on one line: escapes undone, and of a Python traceback only the innermost place."""
    text = reason.strip().strip('"').replace("\\n", "\n").replace('\\"', '"')
    message = text.partition("\n\nAt:")[0]
    place = LOCATION.search(text)
    line = " ".join(message.split())
    return f"{line} [{place.group(1)}]" if place else line
