"""Runs Gluon kernels for Hopper without a GPU: their own source, with stand-ins for the language.

Groups of warps are threads. What the hardware does in its own time happens as late, or is read as early and as late, as
it may be: a tile arrives when somebody can do nothing but wait for it, until then its slot holds not-a-numbers; the
tensor cores' operands must be the same when a product starts and when it is waited for. AssertionError for what would
hang or read what is not there.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.experimental

NAN = float("nan")


class _Tensor(torch.Tensor):
    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


def _tensor(values: torch.Tensor) -> _Tensor:
    return values.as_subclass(_Tensor)


class _World:
    """Of one program: its threads, the copies under way, and who waits."""

    def __init__(self) -> None:
        self.changed, self.copies = threading.Condition(), list[Callable[[], None]]()
        self.threads, self.waiting, self.random = 1, 0, random.Random(0)
        self.own = threading.local()

    def change(self) -> None:
        self.waiting = 0
        self.changed.notify_all()

    def wait_for(self, done: Callable[[], bool]) -> None:
        with self.changed:
            while not done():
                if self.copies:
                    self.copies.pop(self.random.randrange(len(self.copies)))()
                    continue
                self.waiting += 1
                assert self.waiting < self.threads, "all threads wait"
                self.changed.wait()


class _Barrier:
    def __init__(self, world: _World) -> None:
        self.world, self.count, self.left, self.bytes, self.phase = world, 0, 0, 0, 0

    def add(self, arrivals: int, size: int) -> None:
        with self.world.changed:
            self.left -= arrivals
            self.bytes += size
            assert self.left >= 0, "more arrivals than the barrier was made for"
            if not self.left and not self.bytes:
                self.left = self.count
                self.phase += 1
                self.world.change()


class _Shared:
    def __init__(self, parts: Any, dtype: torch.dtype) -> None:
        self.parts, self.dtype = parts, dtype
        self.shape = list(getattr(parts, "shape", ()))

    def index(self, number: int) -> Any:
        assert 0 <= number < len(self.parts)
        part = self.parts[number]
        return part if isinstance(part, _Barrier) else _Shared(part, self.dtype)

    def permute(self, order: tuple[int, ...]) -> _Shared:
        return _Shared(self.parts.permute(order), self.dtype)

    def load(self, layout: Any) -> _Tensor:
        return _tensor(self.parts.clone())


class _Pointer:
    def __init__(self, values: torch.Tensor, at: Any = 0) -> None:
        self.values, self.at = values, at
        self.dtype = SimpleNamespace(element_ty=values.dtype)

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.values, self.at + more)


class _Descriptor:
    def __init__(
        self, base: torch.Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: Any
    ) -> None:
        self.rows, self.block_shape, self.layout = base.as_strided(shape, strides), block_shape, layout
        self.dtype = base.dtype


class _Product:
    """In flight until ``value`` is set."""

    def __init__(self, a: Any, b: _Shared, sums: Any, use_acc: bool) -> None:
        self.a, self.b, self.sums, self.use_acc = a, b, sums, use_acc
        self.value: torch.Tensor | None = None
        self.begun = self._read()

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.a.parts if isinstance(self.a, _Shared) else self.a).clone(), self.b.parts.clone()

    def complete(self) -> None:
        for before, now in zip(self.begun, self._read(), strict=True):
            assert torch.equal(before.nan_to_num(1e9), now.nan_to_num(1e9)), "an operand changed under way"
        sums = self.sums.value if isinstance(self.sums, _Product) else self.sums
        product = self.begun[0].float() @ self.begun[1].float()
        self.value = _tensor(product + sums if self.use_acc else product)


class _Jit:
    def __init__(self, function: Callable[..., Any], start: Callable[..., None]) -> None:
        self.function, self.start = function, start

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            given = [_Pointer(value.view(-1)) if isinstance(value, torch.Tensor) else value for value in args]
            for place in itertools.product(*map(range, grid)):
                self.start(grid, place, num_warps, lambda: self.function(*given, **constants))

        return launch


def load_without_gpu(path: Path, monkeypatch: Any) -> ModuleType:
    """A module of Gluon kernels, whose launches compute on the CPU."""
    current = SimpleNamespace(world=_World(), place=(0,), grid=(1,), warps=0)

    def start(grid: tuple[int, ...], place: tuple[int, ...], warps: int, run: Callable[[], None]) -> None:
        current.world, current.grid, current.place, current.warps = _World(), grid, place, warps
        run()
        assert not current.world.copies, "the program has ended before a copy"

    def jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
        return jit if function is None else _Jit(function, start)

    def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> _Shared:
        if layout == "barriers":
            return _Shared([_Barrier(current.world) for _ in range(shape[0])], dtype)
        return _Shared(torch.full(shape, NAN, dtype=dtype), dtype)

    def load(pointer: _Pointer) -> Any:
        return pointer.values[pointer.at].item()

    def store(pointer: _Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
        mask = mask.expand(values.shape)
        pointer.values[pointer.at.expand(values.shape)[mask]] = values[mask].as_subclass(torch.Tensor)

    def specialize(functions: Any, warps: list[int], registers: list[int]) -> None:
        world, failures = current.world, []
        world.threads = len(functions)

        def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            try:
                function(*args)
            except AssertionError as failure:
                failures.append(failure)
            with world.changed:
                world.threads -= 1
                if failures:
                    world.threads = 0  # so that all who wait fail too
                world.change()

        threads = [threading.Thread(target=run, args=pair) for pair in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def copy(source: _Descriptor, at: list[int], barrier: _Barrier, slot: _Shared) -> None:
        with current.world.changed:
            slot.parts.fill_(NAN)
            (first, column), (rows, columns) = at, source.block_shape
            assert list(slot.parts.shape) == [rows, columns] and first >= 0

            def arrive() -> None:
                found = source.rows[first : first + rows, column : column + columns]
                slot.parts.zero_()
                slot.parts[: len(found)] = found
                barrier.add(0, -2 * rows * columns)

            current.world.copies.append(arrive)
            current.world.change()

    def expect(barrier: _Barrier, size: int, pred: bool = True) -> None:
        if pred:
            barrier.add(1, size)

    def arrive(barrier: _Barrier, pred: bool = True) -> None:
        if pred:
            barrier.add(1, 0)

    def init(barrier: _Barrier, count: int) -> None:
        barrier.count = barrier.left = count

    def wait(barrier: _Barrier, phase: int) -> None:
        current.world.wait_for(lambda: barrier.phase & 1 != phase)

    def mma(a: Any, b: _Shared, sums: Any, use_acc: bool = True, is_async: bool = False) -> _Product:
        product = _Product(a, b, sums, use_acc)
        own = current.world.own
        own.flying = [*getattr(own, "flying", []), product]
        return product

    def mma_wait(number: int, deps: list[Any]) -> Any:
        own = current.world.own
        done, own.flying = own.flying[: len(own.flying) - number], own.flying[len(own.flying) - number :]
        for product in done:
            product.complete()
        values = [dep.value if isinstance(dep, _Product) else dep for dep in deps]
        assert all(value is not None for value in values), "a product is used before it is waited for"
        return values[0] if len(values) == 1 else tuple(values)

    language = ModuleType("language")
    vars(language).update(
        constexpr=Any,
        **{name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int64")},
        **dict.fromkeys(
            ("NVMMASharedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout"), lambda *_, **__: None
        ),
        static_range=range,
        num_warps=lambda: current.warps,
        program_id=lambda axis: current.place[axis],
        num_programs=lambda axis: current.grid[axis],
        thread_barrier=lambda: None,
        cdiv=lambda a, b: -(-a // b),
        maximum=lambda a, b: torch.maximum(a, b) if isinstance(a, torch.Tensor) else max(a, b),
        max=lambda values, axis: values.amax(axis),
        sum=lambda values, axis: values.sum(axis),
        exp2=torch.exp2,
        expand_dims=lambda values, axis: values.unsqueeze(axis),
        where=lambda mask, values, other: torch.where(mask, values, other),
        arange=lambda begin, end, layout: _tensor(torch.arange(begin, end)),
        zeros=lambda shape, dtype, layout: _tensor(torch.zeros(shape, dtype=dtype)),
        convert_layout=lambda values, layout, assert_trivial=False: values,
        allocate_shared_memory=allocate,
        load=load,
        store=store,
        warp_specialize=specialize,
    )
    hopper = ModuleType("hopper")
    vars(hopper).update(
        fence_async_shared=lambda: None,
        mbarrier=SimpleNamespace(MBarrierLayout=lambda: "barriers", init=init, expect=expect, arrive=arrive, wait=wait),
        tma=SimpleNamespace(async_copy_global_to_shared=copy),
        warpgroup_mma=mma,
        warpgroup_mma_wait=mma_wait,
    )
    gluon = ModuleType("gluon")
    vars(gluon).update(jit=jit, constexpr_function=lambda function: function, language=language)
    name = "triton.experimental.gluon"
    for suffix, module in (("", gluon), (".language", language), (".language.nvidia.hopper", hopper)):
        monkeypatch.setitem(sys.modules, name + suffix, module)
    monkeypatch.setitem(sys.modules, f"{name}.nvidia.hopper", SimpleNamespace(TensorDescriptor=_Descriptor))
    monkeypatch.setattr(triton.experimental, "gluon", gluon, raising=False)
    spec = importlib.util.spec_from_file_location("without_gpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "without_gpu", module)
    spec.loader.exec_module(module)
    return module
