"""``tessera serve``: one command that runs the server until it is told to stop."""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import tessera
from tessera.checkpoint.files import find_checkpoint
from tessera.errors import TesseraError
from tessera.launcher import checking
from tessera.launcher.gateway import Gateway
from tessera.launcher.health import health_port
from tessera.launcher.options import ServerOptions, one_per_gpu
from tessera.launcher.process import Server
from tessera.launcher.settings import ServerSetup, regions
from tessera.launcher.supervisor import Fleet, Supervision
from tessera.settings.gpu import DEFAULT_MODELS, check_gpus
from tessera.settings.schema import QUANTIZATIONS
from tessera_wire.command_line import Parser

COMMON = ("device", "gpu_memory", "quantization", "deterministic")
DEFAULTS = vars(ServerOptions(Path())) | vars(Supervision())
GPU_NAME = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z-]+")


class StopRequested(BaseException):
    """SIGTERM or SIGINT arrived; not an Exception, so that no handler on the way swallows it."""


GatewayOptions: TypeAlias = Callable[[Callable[..., Any]], None]
"""Declares the gateway's options by what it is given in place of ArgumentParser.add_argument."""


def serve_main(argv: Sequence[str] | None = None, gateway_options: GatewayOptions | None = None) -> int:
    """Runs ``tessera serve``. Returns 0 after a stop by signal, 1 when the server failed (2: wrong usage).

    The gateway's options are passed on to it as they are: this package knows none of them.
    """
    before = {number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        options, gpus, supervision, flags = parse(list(sys.argv[1:] if argv is None else argv), gateway_options)
        first = replace(options, environment={"CUDA_VISIBLE_DEVICES": gpus[0]}) if gpus else options
        setup = first.set_up()
        on_purpose = any(each.name == "device" and each.origin != "device" for each in setup.effective)
        if gpus and not (setup.device == "cpu" and on_purpose):
            check_gpus(gpus, os.environ)
        if flags.show_settings:
            show(setup)
            return 0
        if flags.check:
            say(checking.judge(setup))
            return 0
        if setup.stages and (fault := checking.fault(setup)):
            say(fault, error=True)
            return 1
        gateway = None
        if with_gateway(flags.openai_port, options.only):
            gateway = Gateway(options.host, flags.openai_port, say, flags.gateway)
        fleet = Fleet(one_per_gpu(options, gpus) if gpus else [options], supervision, say, gateway)
        _, scarce = regions(setup.processes, len(fleet.servers))
        if scarce:
            say(scarce, error=True)
        if setup.division:
            say(setup.division.describe())
        with health_port(fleet.report, options.host, supervision.health_port) as fleet.health_url:
            if flags.verbose:
                for server in fleet.servers:
                    follow_log(server)
            try:
                reason = fleet.run()
            finally:
                fleet.stop()
        say(f"stopped: {reason}", error=True)
        return 1
    except StopRequested:
        say("stopped")
        return 0
    except TesseraError as error:
        say(str(error), error=True)
        return 1
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is request_stop:  # not while a stop comes to its end
                signal.signal(number, handler)


def request_stop(number: int, frame: FrameType | None) -> None:
    """Signal handler: the first signal stops the server, later ones must not cut its clean-up short."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise StopRequested


def parse(
    argv: list[str], gateway_options: GatewayOptions | None = None
) -> tuple[ServerOptions, tuple[str, ...], Supervision, argparse.Namespace]:
    """Command line -> (options, GPUs, supervision, what concerns this command alone).

    What follows ``--`` goes to tritonserver as it is.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(
        prog="tessera serve",
        description="Run tritonserver on a model repository until SIGTERM or Ctrl-C, and restart it when it dies.",
        epilog="Flags after -- are passed on to tritonserver. A port of 0 picks a free one, but for --openai-port.",
    )

    def add(flag: str, help: str = "default %(default)s", **how: Any) -> None:
        """Its default is that of the field with the flag's name."""
        name = how.setdefault("dest", flag.strip("-").replace("-", "_"))
        if "action" not in how:
            how.setdefault("type", type(DEFAULTS.get(name)) if name in DEFAULTS else str)
            how.setdefault("metavar", "N" if how["type"] in (int, float) else "NAME")
        parser.add_argument(flag, help=help, default=how.pop("default", DEFAULTS.get(name)), **how)

    add("--checkpoint", "model folder, or a model of the Hugging Face hub (Org/Name) that is in the local cache",
        type=Path, metavar="DIR")  # fmt: skip
    add("--default", "instead of a folder one of the small models that come with the source: rooms answers questions "
        "about rendered rooms, documents reads pages (default rooms)", choices=DEFAULT_MODELS)  # fmt: skip
    add("--device", "auto, cpu or cuda (default auto: cuda where there is a GPU)")
    add("--gpu-memory", "the part of each GPU's memory that the server may use (default 0.9)", metavar="0.9")
    add("--quantization", "fp8: quantize a plain checkpoint's linear layers while loading; fp8-language, fp8-vision: "
        "one stage's alone; int8-vision: a tower's on a CPU", choices=QUANTIZATIONS)  # fmt: skip
    add("--deterministic", "the same bits of answers and log probabilities whatever else runs (docs/determinism.md)",
        action="store_const", const="on")  # fmt: skip
    add("--set", "any other setting, such as language_model.max_sequences=64; may be repeated", dest="settings",
        type=pair, action="append", default=[], metavar="NAME=VALUE")  # fmt: skip
    add("--show-settings", "print all settings and who set them, and end", action="store_true")
    add("--check", "say whether the checkpoint can be served with these settings, and end: tessera check DIR",
        action="store_true")  # fmt: skip
    add("--model-repository", "default: model_repository here or in the source tree", type=Path, metavar="DIR",
        default=default_repository())  # fmt: skip
    add("--only", "load these models only (as vision_encoder, for other servers to use)", type=names, metavar="NAME,..")
    add("--gpus", "one server for each of these GPUs (numbers or UUIDs, as in CUDA_VISIBLE_DEVICES); each server's "
        "ports are the ones before plus 10", type=gpu_names, default=(), metavar="N,N,...")  # fmt: skip
    add("--no-mps", "start no CUDA MPS daemon: the stages take turns on the GPU", dest="mps", action="store_false")
    add("--host", "address to listen on (default %(default)s: this machine only)")
    for port in ("--http-port", "--grpc-port", "--metrics-port", "--health-port"):
        add(port)
    add("--openai-port", "start the gateway for OpenAI's clients on this port; 0 for none (default %(default)s)",
        type=int, default=9000)  # fmt: skip
    add("--no-restart", "end when a stage or the server dies", dest="restart", action="store_false")
    add("--max-restarts")
    add("--restart-window", "give up after more than --max-restarts within S seconds (%(default)s)",
        dest="restart_window_s", metavar="S")  # fmt: skip
    add("--ping-interval", dest="ping_interval_s", metavar="S")
    add("--ping-timeout", "a stage that does nothing for S seconds is dead (%(default)s)", dest="ping_timeout_s",
        metavar="S")  # fmt: skip
    add("--model-config-name", "use configs/NAME.pbtxt of each model that has it", type=str)
    add("--ready-timeout", dest="ready_timeout_s", metavar="S")
    add("--log", "the server's log (default: in the cache folder)", dest="log_path", type=Path, metavar="FILE")
    add("--verbose", "show the server's log here as well", action="store_true")
    if gateway_options is not None:
        gateway_options(partial(add_verbatim, parser.add_argument_group("options of the gateway")))
    known = vars(parser.parse_args(argv[:split]))
    known["gateway"] = tuple(f"{name}={known.pop(name)}" for name in sorted(known) if name.startswith("--"))
    if known["gateway"] and not with_gateway(known["openai_port"], known["only"] or ()):
        name = known["gateway"][0].partition("=")[0]
        parser.error(f"{name} is for the gateway, which --openai-port 0 or --only without vlm leaves out")
    if name := known.pop("default"):
        if known["checkpoint"]:
            parser.error("--default and --checkpoint both say which model: give one of them")
        known["checkpoint"] = (known["model_repository"] / DEFAULT_MODELS[name]).resolve()
    elif known["checkpoint"]:
        known["checkpoint"] = find_checkpoint(known["checkpoint"])
    settings = dict(known.pop("settings"))
    settings |= {name: value for name in COMMON if (value := known.pop(name)) is not None}
    known |= {"settings": settings, "extra_flags": tuple(argv[split + 1 :])}

    def taken(kind: type) -> dict[str, Any]:
        return {field.name: known.pop(field.name) for field in fields(kind) if field.name in known}

    options, supervision = ServerOptions(**taken(ServerOptions)), Supervision(**taken(Supervision))
    return options, known["gpus"], supervision, argparse.Namespace(**known)


def add_verbatim(group: Any, flag: str, **how: Any) -> None:
    """An option of somebody else's, by the flag's name among the parsed ones if given: checked, and kept as written."""
    kind = how.get("type", str)

    def checked(text: str) -> str:
        kind(text)
        return text

    checked.__name__ = getattr(kind, "__name__", str(kind))  # which argparse names where the value is wrong
    help = how["help"].replace("%(default)s", str(how.get("default")))
    group.add_argument(flag, **how | {"dest": flag, "type": checked, "default": argparse.SUPPRESS, "help": help})


def with_gateway(openai_port: int, only: Sequence[str]) -> bool:
    """Whether there is a gateway beside the servers, which load ``only`` these models, or all."""
    return openai_port != 0 and (not only or "vlm" in only)


def pair(text: str) -> tuple[str, str]:
    """The value of --set."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no setting: write NAME=VALUE")
    return name, value


def names(text: str) -> tuple[str, ...]:
    """The value of --only."""
    return tuple(name.strip() for name in text.split(","))


def gpu_names(text: str) -> tuple[str, ...]:
    """The value of --gpus."""
    gpus = names(text)
    for name in gpus:
        if not GPU_NAME.fullmatch(name):
            raise argparse.ArgumentTypeError(f"{name!r} is no GPU: give numbers with commas between, such as 0,1")
        if gpus.count(name) > 1:
            raise argparse.ArgumentTypeError(f"GPU {name} is named twice")
    return gpus


def show(setup: ServerSetup) -> None:
    """A table of the settings in force."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table(*(Column(title, overflow="fold") for title in ("setting", "value", "from")))
    for each in setup.effective:
        value = "-" if each.value in (None, "") else str(each.value)
        table.add_row(each.name, escape(value), each.origin)
    Console().print(table)
    if setup.division:
        print(setup.division.describe())


def default_repository() -> Path:
    """./model_repository if it is there, else the wheel's own, else the one beside this package's source."""
    package = Path(tessera.__file__).resolve().parent
    places = [Path("model_repository"), package / "model_repository", package.parents[1] / "model_repository"]
    return next((place for place in places if place.is_dir()), places[-1])


def follow_log(server: Server) -> None:
    """Has the server's log copied to standard error as it grows, as long as this process lives: each start's own."""
    command = ["tail", "--lines=0", "-F", f"--pid={os.getpid()}", str(server.log_path)]
    # In a session of its own Ctrl-C does not end it: how the server stops is shown too.
    subprocess.Popen(command, stdout=sys.stderr.fileno(), stderr=subprocess.DEVNULL, start_new_session=True)


def say(message: str, error: bool = False) -> None:
    print(f"tessera: {message}", file=sys.stderr if error else sys.stdout, flush=True)


if __name__ == "__main__":
    raise SystemExit(serve_main())
