"""Windows of ranks' memory, with a driver that writes down what it maps; copies of pieces on the CPU."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ditron_train.runtime.errors import DitronError
from ditron_train.stream import driver, shared_mappings
from ditron_train.stream import window as windows
from ditron_train.stream.copies import StridedCopy, copy_strided
from ditron_train.stream.window import ring_window, send_strided
from ditron_train.symm.arena import SymmetricTensor
from ditron_train.symm.transport import Segment

SIZE, BASE, OFFSET = 2 << 20, 1 << 40, 256


@pytest.fixture
def mapped(monkeypatch):
    """What is mapped now: base of the window -> the addresses it was made for."""
    live: dict[int, list[int]] = {}

    def map_side_by_side(addresses, num_bytes):
        assert num_bytes == 64
        base = BASE * (1 + len(live))
        live[base] = list(addresses)
        return base, SIZE, OFFSET

    def unmap(base, num_bytes):
        assert num_bytes == SIZE * len(live.pop(base))

    monkeypatch.setattr(shared_mappings, "map_side_by_side", map_side_by_side)
    monkeypatch.setattr(shared_mappings, "unmap", unmap)
    return live


def _tensor(world_size: int = 4, is_mappable: bool = True) -> SymmetricTensor:
    parts = [torch.zeros(64, dtype=torch.uint8) for _ in range(world_size)]
    addresses = [part.data_ptr() for part in parts]
    segment = Segment(parts[0], parts, addresses, is_mappable=is_mappable)
    return SymmetricTensor(segment, (16,), torch.float32, torch.tensor(addresses))


def test_each_is_mapped_once_until_the_memory_is_freed(mapped):
    tensor = _tensor()
    ring = ring_window(tensor)
    assert mapped == {ring.base: tensor.host_addresses * 2}
    assert [ring.address(p) - ring.base for p in (0, 1, 7)] == [OFFSET, SIZE + OFFSET, 7 * SIZE + OFFSET]
    assert ring_window(tensor) is ring and len(mapped) == 1
    freed = []
    tensor.segment.release = lambda: freed.append(dict(mapped))
    tensor.segment.free()
    assert freed == [{}]  # unmapped before the memory goes


def test_none_where_memory_cannot_be_mapped(mapped):
    assert ring_window(_tensor(is_mappable=False)) is None and not mapped


def test_none_where_the_driver_refuses_and_it_is_asked_once(mapped, monkeypatch):
    asked = []

    def refuse(addresses, num_bytes):
        asked.append(addresses)
        raise DitronError("not this memory")

    monkeypatch.setattr(shared_mappings, "map_side_by_side", refuse)
    tensor = _tensor()
    assert ring_window(tensor) is None and ring_window(tensor) is None and len(asked) == 1
    tensor.segment.free()


def test_nothing_new_is_mapped_while_a_graph_is_captured(mapped, monkeypatch):
    tensor, other = _tensor(), _tensor()
    ring = ring_window(tensor)
    monkeypatch.setattr(windows, "is_capturing", lambda device: True)
    assert ring_window(tensor) is ring and ring_window(other) is None
    monkeypatch.setattr(windows, "is_capturing", lambda device: False)
    assert ring_window(other) is not None


def test_buffers_that_are_too_large_are_not_mapped(mapped, monkeypatch):
    monkeypatch.setattr(windows, "_MAX_PITCH_BYTES", 63)
    monkeypatch.setattr(shared_mappings, "map_side_by_side", None)  # nobody asks
    tensor = _tensor()
    assert ring_window(tensor) is None
    tensor.segment.free()


def test_memory_is_freed_though_a_window_cannot_be_unmapped(mapped, monkeypatch, caplog):
    tensor, freed = _tensor(), []

    def refuse(base, num_bytes):
        raise DitronError("a broken context")

    monkeypatch.setattr(shared_mappings, "unmap", refuse)
    assert ring_window(tensor) is not None
    tensor.segment.release = lambda: freed.append(True)
    tensor.segment.free()
    assert freed and "a broken context" in caplog.text


def test_shared_memory_is_mapped_once_more():
    """Each page by two more addresses; what is written by one is read by the others; gone by ``unmap``."""
    parts = [mmap.mmap(-1, 3 * mmap.PAGESIZE) for _ in range(2)]  # anonymous and shared
    tensors = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
    first, second = (tensor.data_ptr() for tensor in tensors)
    num_bytes = 2 * mmap.PAGESIZE + 5
    base, pitch, offset = shared_mappings.map_side_by_side([first, second, first], num_bytes)
    assert (pitch, offset) == (3 * mmap.PAGESIZE, 0)
    ctypes.memset(base + 2 * pitch + num_bytes - 1, 7, 1)
    ctypes.memset(base + pitch, 9, 1)
    assert tensors[0][num_bytes - 1] == 7 and tensors[1][0] == 9
    tensors[0][0] = 11
    assert ctypes.string_at(base, 1) == ctypes.string_at(base + 2 * pitch, 1) == b"\x0b"
    assert f"{base:x}-" in Path("/proc/self/maps").read_text()
    shared_mappings.unmap(base, 3 * pitch)
    assert f"{base:x}-" not in Path("/proc/self/maps").read_text()
    assert tensors[0][num_bytes - 1] == 7


def test_shared_memory_that_begins_inside_a_page_is_refused():
    with pytest.raises(DitronError, match="page"):
        shared_mappings.map_side_by_side([mmap.PAGESIZE + 8], 8)


def test_private_memory_is_refused_and_nothing_stays_mapped():
    """The system would give an empty mapping where it cannot give these pages."""
    part = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(part, dtype=torch.uint8).data_ptr()
    with pytest.raises(DitronError, match="mapped once more"):
        shared_mappings.map_side_by_side([address, address], 8)


@pytest.mark.parametrize("error", [DitronError("invalid value"), AttributeError("CUDA_MEMCPY2D")])
def test_a_driver_that_refuses_is_an_answer(monkeypatch, error):
    def refuse(strided_copies, stream):
        raise error

    assert send_strided([], None)
    monkeypatch.setattr(windows, "copy_strided", refuse)
    assert not send_strided([], None)


class _FakeCuda:
    """The calls of ``map_side_by_side``: allocations of SIZE bytes, one of which cannot be mapped."""

    def __init__(self, failing: int | None = None, sizes: dict[int, int] | None = None) -> None:
        self.failing, self.sizes = failing, sizes or {}
        self.reserved: dict[int, int] = {}
        self.held: list[int] = []
        self.maps: list[tuple[int, int, int]] = []
        self.CUmemAccessDesc = lambda: SimpleNamespace(location=SimpleNamespace())
        self.CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
        self.CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def cuMemGetAddressRange(self, address):
        return 0, address // SIZE * SIZE, self.sizes.get(address // SIZE, SIZE)

    def cuMemAddressReserve(self, size, alignment, address, flags):
        self.reserved[BASE] = size
        return 0, BASE

    def cuMemRetainAllocationHandle(self, address):
        if address // SIZE == self.failing:
            return (1, None)
        self.held.append(address // SIZE)
        return 0, address // SIZE

    def cuMemRelease(self, handle):
        self.held.remove(handle)
        return (0,)

    def cuMemMap(self, address, size, offset, handle, flags):
        self.maps.append((address, size, handle))
        return (0,)

    def cuCtxGetDevice(self):
        return 0, 3

    def cuMemSetAccess(self, address, size, descriptors, count):
        assert (address, size) == (BASE, self.reserved[BASE]) and descriptors[0].location.id == 3
        return (0,)

    def cuMemUnmap(self, address, size):
        assert size == sum(part for _, part, _ in self.maps)
        self.maps.clear()
        return (0,)

    def cuMemAddressFree(self, address, size):
        assert self.reserved.pop(address) == size
        return (0,)


def _allocations(*numbers):
    return [number * SIZE + OFFSET for number in numbers]


def test_the_driver_maps_allocations_one_behind_another(monkeypatch):
    cuda = _FakeCuda()
    monkeypatch.setattr(driver, "_driver", lambda: cuda)
    assert driver.map_side_by_side(_allocations(5, 6, 5), 64) == (BASE, SIZE, OFFSET)
    assert cuda.maps == [(BASE, SIZE, 5), (BASE + SIZE, SIZE, 6), (BASE + 2 * SIZE, SIZE, 5)] and not cuda.held
    driver.unmap(BASE, 3 * SIZE)
    assert not cuda.maps and not cuda.reserved


@pytest.mark.parametrize("failing", [5, 7])
def test_the_driver_leaves_nothing_mapped_where_one_fails(monkeypatch, failing):
    cuda = _FakeCuda(failing)
    monkeypatch.setattr(driver, "_driver", lambda: cuda)
    with pytest.raises(DitronError):
        driver.map_side_by_side(_allocations(5, 6, 7), 64)
    assert not cuda.maps and not cuda.reserved and not cuda.held


def test_the_driver_maps_nothing_where_places_differ(monkeypatch):
    cuda = _FakeCuda(sizes={6: 2 * SIZE})
    monkeypatch.setattr(driver, "_driver", lambda: cuda)
    for addresses in (_allocations(5, 6), [5 * SIZE, 7 * SIZE + OFFSET]):
        with pytest.raises(DitronError, match="different places"):
            driver.map_side_by_side(addresses, 64)
    with pytest.raises(DitronError, match="more than one mapping"):
        driver.map_side_by_side(_allocations(5, 7), SIZE)
    assert not cuda.maps and not cuda.reserved


@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 6), st.integers(0, 6))
def test_pieces_are_copied_each_to_its_place(count, num_bytes, gap, source_gap):
    pitch, source_pitch = num_bytes + gap, num_bytes + source_gap
    source = np.arange(1, 1 + max(1, count * source_pitch), dtype=np.uint8)
    destination, expected = (np.zeros(max(1, count * pitch), dtype=np.uint8) for _ in range(2))
    for piece in range(count):
        expected[piece * pitch :][:num_bytes] = source[piece * source_pitch :][:num_bytes]
    addresses = (array.ctypes.data_as(ctypes.c_void_p).value for array in (destination, source))
    copy_strided([StridedCopy(next(addresses), pitch, next(addresses), source_pitch, num_bytes, count)], None)
    assert (destination == expected).all()
