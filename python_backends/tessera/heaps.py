"""What the C library of a process keeps of the memory that is freed. Where it is not glibc, nothing changes."""

import ctypes

# malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_BYTES = 32 << 20  # the most that glibc takes
KEPT_BYTES = 128 << 20


def keep_freed() -> None:
    """From now on the next picture gets the memory that the last one left. Left alone, glibc gives a picture's pixels
    back to the system again and again, and each page of 4 KiB costs a fault at its next use: of a picture of a
    megapixel 3,086, more than its decoding takes. A heap keeps up to KEPT_BYTES; what is larger than MMAP_BYTES still
    comes from the system and goes back at once."""
    _mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
    _mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def _mallopt(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
