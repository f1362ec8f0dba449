"""Carries the libraries of TensorRT 8.5.3 to a machine without a package registry. Needs Python alone.

    python build/tensorrt85/libraries.py pack WHEELS OUT [--megabytes 39.6]
    python3 libraries.py unpack LIB FOLDER...
    python3 libraries.py check LIB SUMS

pack fills folders that are carried one by one. WHEELS holds tensorrt==8.5.3.1 (cp310), nvidia-cuda-runtime-cu11,
nvidia-cublas-cu11 and nvidia-cudnn-cu11 (8.6). OUT/p1, p2, ... hold pieces of the libraries, compressed;
OUT/libs.sha256 what they must be once joined. Code of other chips than sm_90 is zeroed, except in
libnvinfer_builder_resource, whose digest TensorRT checks.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import os
import re
import struct
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

CHUNK = 24 << 20
WHOLE = ("libnvinfer_builder_resource.so.8.5.3", "libnvinfer_plugin.so.8", "libnvonnxparser.so.8")
HOST = ("libcudart.so.11.0", "libcudnn.so.8")
SLIMMED = ("libnvinfer.so.8", "libcublas.so.11", "libcublasLt.so.11", "libcudnn_ops_infer.so.8")
FATBIN = re.compile(b"\x50\xed\x55\xba\x01\x00\x10\x00")
PTX, CUBIN, HOPPER = 1, 2, 90


def slim(library: bytearray) -> int:
    """Zero the machine code of other chips, and PTX beside sm_90's own code; headers stay. Returns the zeroed bytes."""
    zeroed = 0
    for found in FATBIN.finditer(bytes(library)):
        at = found.start() + 16
        end = at + struct.unpack_from("<Q", library, found.start() + 8)[0]
        entries = []
        while at < end <= len(library):
            kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
            if kind not in (PTX, CUBIN) or not 32 <= header <= 4096 or at + header + size > end + 64:
                break
            entries.append((kind, struct.unpack_from("<I", library, at + 28)[0], at + header, size))
            at += header + size
        native = any(kind == CUBIN and chip == HOPPER for kind, chip, _, _ in entries)
        for kind, chip, start, size in entries:
            if (kind == CUBIN and chip != HOPPER) or (kind == PTX and native):
                library[start : start + size] = bytes(size)
                zeroed += size
    return zeroed


def compress(job: tuple[Path, str, int]) -> Path:
    """One piece of a library; literals aligned to the 16 bytes of an instruction, which halves the time."""
    library, name, number = job
    with library.open("rb") as file:
        file.seek(number * CHUNK)
        data = file.read(CHUNK)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": CHUNK, "lc": 0, "lp": 4, "pb": 4}]
    out = library.parent / f"{name}.{number:02d}.xz"
    out.write_bytes(lzma.compress(data, filters=filters, check=lzma.CHECK_CRC32))
    return out


def pack(arguments: argparse.Namespace) -> int:
    work = arguments.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    sums, jobs = [], []
    for wheel in sorted(arguments.wheels.glob("*.whl")):
        archive = zipfile.ZipFile(wheel)
        for member in archive.namelist():
            name = Path(member).name
            if name not in (*WHOLE, *HOST, *SLIMMED):
                continue
            library = bytearray(archive.read(member))
            zeroed = slim(library) if name in SLIMMED else 0
            print(f"{name}: {len(library) / 1e6:.0f} MB, zeroed {zeroed / 1e6:.0f}", flush=True)
            (work / name).write_bytes(library)
            sums.append(f"{hashlib.sha256(library).hexdigest()} {name}\n")
            jobs += [(work / name, name, number) for number in range(-(-len(library) // CHUNK))]
    missing = {*WHOLE, *HOST, *SLIMMED} - {line.split()[1] for line in sums}
    if missing:
        raise SystemExit(f"{arguments.wheels} has no {', '.join(sorted(missing))}: see docs/tensorrt.md for the wheels")
    (arguments.out / "libs.sha256").write_text("".join(sorted(sums)))
    with ProcessPoolExecutor() as pool:
        pieces = sorted(pool.map(compress, jobs), key=lambda piece: -piece.stat().st_size)
    room = arguments.megabytes * 1e6
    folders: list[list[Path]] = []  # first fit, largest first
    for piece in pieces:
        for folder in folders:
            if sum(p.stat().st_size for p in [*folder, piece]) <= room:
                folder.append(piece)
                break
        else:
            folders.append([piece])
    for number, folder in enumerate(folders, 1):
        (arguments.out / f"p{number}").mkdir(exist_ok=True)
        for piece in folder:
            piece.rename(arguments.out / f"p{number}" / piece.name)
        size = sum(p.stat().st_size for p in (arguments.out / f"p{number}").iterdir())
        print(f"p{number}: {size / 1e6:.1f} MB in {len(folder)} pieces")
    return 0


def place(job: tuple[Path, Path]) -> None:
    library, piece = job
    data = lzma.decompress(piece.read_bytes())
    number = int(piece.name.removesuffix(".xz")[-2:])
    file = os.open(library / piece.name[: -len(".00.xz")], os.O_WRONLY | os.O_CREAT)
    os.pwrite(file, data, number * CHUNK)
    os.close(file)


def check(job: tuple[Path, str]) -> str:
    """What is wrong with one library, or nothing."""
    file, wanted = job
    if not file.is_file():
        return f"{file.name} is missing"
    return "" if hashlib.sha256(file.read_bytes()).hexdigest() == wanted else f"{file.name} is not whole"


def unpack(arguments: argparse.Namespace) -> int:
    arguments.library.mkdir(parents=True, exist_ok=True)
    pieces = [piece for folder in arguments.folders for piece in sorted(folder.glob("*.xz"))]
    with ProcessPoolExecutor() as pool:
        list(pool.map(place, [(arguments.library, piece) for piece in pieces]))
    print(f"{len(pieces)} pieces placed")
    return 0


def check_all(arguments: argparse.Namespace) -> int:
    lines = [line.split() for line in arguments.sums.read_text().splitlines()]
    with ProcessPoolExecutor() as pool:
        jobs = [(arguments.library / name, digest) for digest, name in lines]
        wrong = [fault for fault in pool.map(check, jobs) if fault]
    print("; ".join(wrong) or f"{len(lines)} libraries, all whole")
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)
    step = steps.add_parser("pack")
    step.set_defaults(does=pack)
    step.add_argument("wheels", type=Path)
    step.add_argument("out", type=Path)
    step.add_argument("--megabytes", type=float, default=39.6, help="of a folder (%(default)s)")
    step = steps.add_parser("unpack")
    step.set_defaults(does=unpack)
    step.add_argument("library", type=Path)
    step.add_argument("folders", type=Path, nargs="+")
    step = steps.add_parser("check")
    step.set_defaults(does=check_all)
    step.add_argument("library", type=Path)
    step.add_argument("sums", type=Path)
    arguments = parser.parse_args(argv)
    return arguments.does(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
