"""What a directory of shards says of itself, and its entries; nothing in it is run or believed unchecked.

DCP's ``.metadata`` is a pickle. It is read into inert records, of which only exact names are allowed, and torch's
metadata is built anew from what the records hold: a pickle cannot call anything, nor reach a class of this process.
Entries are read with ``weights_only=True`` and have to be the tensors that the metadata promises.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA_FILE = ".metadata"

T = TypeVar("T")
Stored = Mapping[tuple[str, tuple[int, ...]], "_Record"]

_DCP = "torch.distributed.checkpoint.metadata"
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_ALLOWED = frozenset(
    {
        (_DCP, "Metadata"),
        (_DCP, "MetadataIndex"),
        (_DCP, "TensorStorageMetadata"),
        (_DCP, "BytesStorageMetadata"),
        (_DCP, "ChunkStorageMetadata"),
        (_DCP, "TensorProperties"),
        (_DCP, "StorageMeta"),
        (_DCP, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
    }
)


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and the bytes in which it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor of a directory; its chunks cover it exactly."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class Directory:
    """A directory of shards whose description has been read and checked.

    Args:
        path: of the directory.

    Raises:
        ValueError: naming the file and the entry, where the description is not one that this package writes, or does
            not fit the files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = _read_entries(path)

    def as_metadata(self) -> Metadata:
        """For DCP's planner."""
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            TensorProperties,
            TensorStorageMetadata,
        )

        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(dtype=entry.dtype),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
                )
                for key, entry in self.entries.items()
            }
        )

    def read(self, key: str, offsets: Iterable[int]) -> Tensor:
        """The chunk of an entry that begins at ``offsets``."""
        entry, wanted = self.entries[key], tuple(offsets)
        chunk = next(chunk for chunk in entry.chunks if chunk.offsets == wanted)
        file = self.path / chunk.file
        with file.open("rb") as stream:
            stream.seek(chunk.start)
            stored = io.BytesIO(stream.read(chunk.length))
        try:
            value = torch.load(stored, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"'{file}': the entry {key!r} cannot be read as a tensor: {error}") from error
        if not isinstance(value, Tensor) or tuple(value.shape) != chunk.sizes or value.dtype != entry.dtype:
            found = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"'{file}': the entry {key!r} should be {chunk.sizes} {entry.dtype} by {METADATA_FILE}, and is {found}"
            )
        return value


def fill(directory: Directory, targets: dict[str, Tensor]) -> None:
    """Read entries into tensors, of which a sharded one gets this rank's part; no rank waits for another.

    Raises:
        ValueError: naming the file or the entry, where one cannot be read or does not fit.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, directory.as_metadata(), is_coordinator=True)
    try:
        plan = planner.create_local_plan()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"'{directory.path}' is the checkpoint of another module: {error}") from error
    for item in plan.items:
        value = directory.read(item.storage_index.fqn, item.storage_index.offset or ())
        part = tuple(slice(start, start + n) for start, n in zip(item.storage_offsets, item.lengths, strict=True))
        planner.resolve_tensor(item).detach().copy_(value[part])


# -- the pickle ------------------------------------------------------------------------------------------------------


class _Record:
    """What a pickle says of one object."""

    name = ""
    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> _Record:
        record = super().__new__(cls)
        record.arguments, record.state = arguments, {}
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, key: str) -> Any:
        if not isinstance(self.state, dict) or key not in self.state:
            raise ValueError(f"a {self.name} without {key!r}")
        return self.state[key]


class _InertUnpickler(pickle.Unpickler):
    """Makes records of a few names and refuses all others; a dotted name is none of them."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) in _ALLOWED:  # a class of its own for each, since a pickle can set attributes of classes
            return type(name, (_Record,), {"name": name})
        raise pickle.UnpicklingError(f"it must not contain {module}.{name}")


def _read_entries(path: Path) -> dict[str, Entry]:
    file = path / METADATA_FILE
    files = {found.name: found.stat().st_size for found in path.iterdir() if found.is_file()}
    try:
        with file.open("rb") as stream:
            root = _InertUnpickler(stream).load()
        declared = _as(dict, _named(root, "Metadata")["state_dict_metadata"])
        stored = _locations(root["storage_data"])
        return {_as(str, key): _entry(key, value, stored, files) for key, value in declared.items()}
    except Exception as error:  # a pickle that was tampered with raises anything
        raise ValueError(f"'{file}' does not describe a checkpoint of this package: {error}") from error


def _locations(storage_data: Any) -> dict[tuple[str, tuple[int, ...]], _Record]:
    """By name and offsets of a chunk."""
    found = {}
    for index, location in _as(dict, storage_data).items():
        name, offset = _as(str, _named(index, "MetadataIndex")["fqn"]), index.state.get("offset")
        found[name, () if offset is None else _sizes(offset)] = _named(location, "_StorageInfo")
    return found


def _entry(key: str, declared: Any, stored: Stored, files: Mapping[str, int]) -> Entry:
    try:
        record = _as(_Record, declared)
        if record.name != "TensorStorageMetadata":
            raise ValueError(f"declared as {record.name}, and only tensors are written here")
        properties, shape = _named(record["properties"], "TensorProperties").state, _sizes(record["size"])
        chunks = tuple(_chunk(key, chunk, stored, files) for chunk in _as(list, record["chunks"]))
        if problem := _gap(shape, chunks):
            raise ValueError(f"of shape {shape}, with {problem}")
        return Entry(shape, _as(torch.dtype, _as(tuple, properties)[0]), chunks)
    except ValueError as error:
        raise ValueError(f"the entry {key!r}: {error}") from error


def _chunk(key: str, declared: Any, stored: Stored, files: Mapping[str, int]) -> Chunk:
    offsets, sizes = _sizes(_named(declared, "ChunkStorageMetadata")["offsets"]), _sizes(declared["sizes"])
    if (key, offsets) not in stored:
        raise ValueError(f"there are no bytes for the part at {offsets}")
    location = stored[key, offsets]
    name, start, length = _as(str, location["relative_path"]), _size(location["offset"]), _size(location["length"])
    if location.state.get("transform_descriptors"):
        raise ValueError("stored in another form than this package writes")
    if name not in files:
        raise ValueError(f"stored in {name!r}, which is not a file of the directory")
    if start + length > files[name]:
        raise ValueError(f"ends at byte {start + length} of {name!r}, which has {files[name]}")
    return Chunk(offsets, sizes, name, start, length)


def _gap(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> str | None:
    """What keeps the chunks from covering the tensor exactly: one outside it, an overlap, or something left out."""
    for chunk in chunks:
        ranks_agree = len(chunk.offsets) == len(chunk.sizes) == len(shape)
        if not ranks_agree or any(o + n > whole for o, n, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return f"a part of sizes {chunk.sizes} at {chunk.offsets}"
    if _any_overlap([chunk for chunk in chunks if prod(chunk.sizes)]):
        return "parts that overlap"
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
        return "parts that leave some of it out"
    return None


def _any_overlap(chunks: list[Chunk]) -> bool:
    """Sweeps along the first dim, so that the parts of many ranks are compared with their neighbours only."""
    active: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets):
        start = chunk.offsets[:1]
        active = [other for other in active if (other.offsets[0] + other.sizes[0],) > start] if start else active
        if any(_overlap(chunk, other) for other in active):
            return True
        active.append(chunk)
    return False


def _overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def _named(value: Any, name: str) -> _Record:
    record = _as(_Record, value)
    if record.name != name:
        raise ValueError(f"a {record.name} where a {name} belongs")
    return record


def _sizes(value: Any) -> tuple[int, ...]:
    """Of a ``torch.Size``, which is pickled as a call with one tuple."""
    arguments = _named(value, "Size").arguments
    return tuple(_size(size) for size in _as(tuple, arguments[0] if len(arguments) == 1 else None))


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a size belongs")
    return value


def _as(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value
