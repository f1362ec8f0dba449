"""Join carried pieces (pack.py) to libraries.   python3 unpack.py LIB FOLDER...   python3 unpack.py LIB --check SUMS"""

from __future__ import annotations

import hashlib
import lzma
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

CHUNK = 24 << 20  # pack.py's


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


def main() -> int:
    library = Path(sys.argv[1])
    library.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        if sys.argv[2] == "--check":
            lines = [line.split() for line in Path(sys.argv[3]).read_text().splitlines()]
            wrong = [fault for fault in pool.map(check, [(library / name, digest) for digest, name in lines]) if fault]
            print("; ".join(wrong) or f"{len(lines)} libraries, all whole")
            return 1 if wrong else 0
        pieces = [piece for folder in sys.argv[2:] for piece in sorted(Path(folder).glob("*.xz"))]
        list(pool.map(place, [(library, piece) for piece in pieces]))
    print(f"{len(pieces)} pieces placed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
