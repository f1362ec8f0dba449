"""NVIDIA's JPEG decoder, called through ctypes: a file's bytes to its planes on the GPU, as they were stored.

Interface: nvjpeg.h of the CUDA toolkit (https://docs.nvidia.com/cuda/nvjpeg). Its RGB output is not used, since it
spreads the chroma to the nearest pixels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from tessera.errors import ConfigError, InvalidRequest

COMPONENTS = 4  # NVJPEG_MAX_COMPONENT
OUTPUT_YUV, OUTPUT_RGB = 1, 3  # nvjpegOutputFormat_t
# nvjpegStatus_t: the file is at fault (bad, not supported, incomplete; invalid parameter: what a damaged header gives)
FAULTS_OF_THE_FILE = {2, 3, 4, 9, 10}
VERSIONS = ("13", "12", "11")
# What it holds beside the planes, for each pixel of the largest picture so far: coefficients and the file.
OWN_BYTES = 8


class _Image(ctypes.Structure):
    """nvjpegImage_t: a pointer and a pitch in bytes for each plane."""

    _fields_ = [("channel", ctypes.c_void_p * COMPONENTS), ("pitch", ctypes.c_size_t * COMPONENTS)]


class NvJpeg:
    """One decoder on one device, for one thread.

    It decodes on a stream of its own, which torch's current stream then waits for: a state takes the next file only
    when the GPU is done with the last, and that wait should not be one for everything else the GPU has to do.
    """

    def __init__(self, device: str | torch.device = "cuda") -> None:
        """Raises ConfigError where the library is missing or refuses the device."""
        self._device = torch.device(device)
        self._library = _load()
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()  # torch's context is the current one from here on
            status = self._library.nvjpegCreateSimple(ctypes.byref(self._handle))
            if status:
                raise ConfigError(
                    f"nvJPEG does not start on {self._device} (status {status}); use picture_decoder none"
                )
            self._renew_state()
            self._stream = torch.cuda.Stream()
            self._done = torch.cuda.Event()

    def sizes(self, data: np.ndarray) -> list[tuple[int, int]]:
        """(width, height) of each stored plane. Raises InvalidRequest for what is not a JPEG."""
        count, subsampling = ctypes.c_int(), ctypes.c_int()
        widths, heights = (ctypes.c_int * COMPONENTS)(), (ctypes.c_int * COMPONENTS)()
        status = self._library.nvjpegGetImageInfo(
            self._handle,
            data.ctypes.data,
            data.size,
            ctypes.byref(count),
            ctypes.byref(subsampling),
            widths,
            heights,
        )
        _check(status)
        return list(zip(widths, heights))[: count.value]

    def planes(self, data: np.ndarray, output: int = OUTPUT_YUV) -> list[torch.Tensor]:
        """Y, Cb and Cr of a file (uint8 [bytes], contiguous) as uint8 [height, width] each, chroma as stored.

        Raises InvalidRequest for a file that cannot be decoded. With OUTPUT_RGB: R, G and B, for comparison.
        """
        sizes = self.sizes(data)
        if output == OUTPUT_RGB:
            sizes = sizes[:1] * 3
        image = _Image()
        planes = []
        current = torch.cuda.current_stream(self._device)
        self._done.synchronize()
        with torch.cuda.stream(self._stream):
            for number, (width, height) in enumerate(sizes):
                plane = torch.empty((height, width), dtype=torch.uint8, device=self._device)
                image.channel[number], image.pitch[number] = plane.data_ptr(), width
                planes.append(plane)
            arguments = (data.ctypes.data, data.size, output, ctypes.byref(image), self._stream.cuda_stream)
            status = self._library.nvjpegDecode(self._handle, self._state, *arguments)
            self._done.record()
            if status:
                self._done.synchronize()
                self._renew_state()
        _check(status)
        current.wait_event(self._done)
        for plane in planes:
            plane.record_stream(current)
        return planes

    def _renew_state(self) -> None:
        """A state after a failure may be anything."""
        if self._state:
            self._library.nvjpegJpegStateDestroy(self._state)
        status = self._library.nvjpegJpegStateCreate(self._handle, ctypes.byref(self._state))
        if status:
            raise RuntimeError(f"nvJPEG gives no decoding state (status {status})")


def _check(status: int) -> None:
    if status in FAULTS_OF_THE_FILE:
        raise InvalidRequest(f"its JPEG data are damaged or of an unusual kind (nvJPEG status {status}); save it anew")
    if status:
        raise RuntimeError(f"nvJPEG failed with status {status}")


def _load() -> ctypes.CDLL:
    """The library with its functions declared; raises ConfigError saying where it was looked for."""
    tried = []
    for name in _places():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            tried.append(name)
            continue
        pointer, size, whole = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for function, arguments in {
            "nvjpegCreateSimple": [pointer],
            "nvjpegJpegStateCreate": [pointer, pointer],
            "nvjpegJpegStateDestroy": [pointer],
            "nvjpegGetImageInfo": [pointer, pointer, size, pointer, pointer, pointer, pointer],
            "nvjpegDecode": [pointer, pointer, pointer, size, whole, pointer, pointer],
        }.items():
            getattr(library, function).argtypes = arguments
            getattr(library, function).restype = whole
        return library
    raise ConfigError(f"picture_decoder nvjpeg needs libnvjpeg.so of the CUDA toolkit; tried {', '.join(tried)}")


def _places() -> Iterator[str]:
    """Where the library may be: with torch's own CUDA packages, where the loader looks, in the toolkit's folder."""
    packages = Path(torch.__file__).resolve().parent.parent
    own = str(torch.version.cuda or "").split(".")[0]
    versions = sorted(VERSIONS, key=lambda version: version != own)  # torch's own CUDA first
    for version in versions:
        for pattern in (f"nvidia/*/lib/libnvjpeg.so.{version}", f"torchvision.libs/libnvjpeg*.so.{version}"):
            yield from map(str, sorted(packages.glob(pattern)))
        yield f"libnvjpeg.so.{version}"
        for pattern in (f"cuda*/lib64/libnvjpeg.so.{version}", f"cuda*/targets/*/lib/libnvjpeg.so.{version}"):
            yield from map(str, sorted(Path("/usr/local").glob(pattern)))
