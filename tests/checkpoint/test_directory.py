"""A directory of shards is data: whatever its files hold, nothing is run, and nothing that does not fit is loaded."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex

from lightning_effi.checkpoint import full, sharded
from lightning_effi.checkpoint.directory import Chunk, _gap
from lightning_effi.checkpoint.stored import read_model, read_optimizers

MOMENT = "optimizer.0.0.weight.exp_avg"


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return module, optimizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "good.ckpt"
    module, optimizer = make(0)
    checkpoint = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 3}
    sharded.save(path, checkpoint, [optimizer], module, is_first_rank=True, barrier=lambda: None)
    return path


@pytest.fixture
def copied(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy.ckpt"))


def load(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    checkpoint = sharded.load(path, None)
    state, states = read_model(checkpoint["state_dict"], module.state_dict()), checkpoint["optimizer_states"]
    [moments] = read_optimizers(states, [full.by_position(optimizer, states[0])])
    full.load_model(module, state, strict=True)
    full.load_optimizer(optimizer, moments)


def values(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for entries in optimizer.state.values() for value in entries.values()]
    return [value.detach().clone() for value in (*module.parameters(), *moments)]


def refuses(path: Path, named: str) -> str:
    """Loading ends in an error that names the file, and neither module nor optimizer has changed."""
    module, optimizer = make(1)
    before = values(module, optimizer)
    with pytest.raises(ValueError) as error:
        load(path, module, optimizer)
    assert str(path / named) in str(error.value)
    assert all(map(torch.equal, before, values(module, optimizer)))
    return str(error.value)


def test_what_was_saved_is_loaded(good: Path) -> None:
    module, optimizer = make(1)
    load(good, module, optimizer)
    assert all(map(torch.equal, values(*make(0)), values(module, optimizer)))


# -- code --------------------------------------------------------------------------------------------------------------


@dataclass
class Evil:
    """Makes a folder when it is unpickled."""

    marker: str

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def calling(module: str, name: str) -> Callable[[str], bytes]:
    """A pickle that calls something with the marker's path."""
    return lambda marker: b"\x80\x04" + text(module) + text(name) + b"\x93" + text(marker) + b"\x85R."


def setting_attributes_of(module: str, name: str) -> Callable[[str], bytes]:
    """A pickle that sets an attribute of a class of this process."""
    attributes = b"N}" + text("planted") + b"K\x01s\x86"
    return lambda marker: b"\x80\x04" + text(module) + text(name) + b"\x93" + attributes + b"b."


PICKLES: dict[str, Callable[[str], bytes]] = {
    "a function": calling("os", "mkdir"),
    "a function of an allowed module": calling("torch.distributed.checkpoint.filesystem", "_generate_uuid"),
    "a dotted name in an allowed module": calling("torch.distributed.checkpoint.filesystem", "os.mkdir"),
    "a dotted name behind an allowed class": calling("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
    "a dotted name behind a dtype": calling("torch", "float32.__class__"),
    "a name of torch": calling("torch", "os"),
    "a loader of torch": calling("torch", "load"),
    "eval": calling("builtins", "eval"),
    "getattr": calling("builtins", "getattr"),
    "a path's method": calling("pathlib", "Path.mkdir"),
    "an old protocol": lambda marker: f"cos\nmkdir\n(V{marker}\ntR.".encode(),
    "a class of this process": lambda marker: pickle.dumps(Evil(marker)),
    "a persistent id": lambda marker: b"\x80\x04" + text(marker) + b"Q.",
    "an extension's code": lambda marker: b"\x80\x04\x82\x01.",
    "attributes of a class": setting_attributes_of("torch.distributed.checkpoint.metadata", "Metadata"),
    "attributes of an enumeration": setting_attributes_of(
        "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"
    ),
    "nothing": lambda marker: b"",
}


@pytest.mark.parametrize("name", PICKLES)
def test_metadata_runs_nothing(copied: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    (copied / ".metadata").write_bytes(PICKLES[name](str(marker)))
    refuses(copied, ".metadata")
    assert not marker.exists()
    assert not hasattr(Metadata, "planted")


def test_an_entry_declared_as_bytes_runs_nothing(copied: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    metadata = read_metadata(copied)
    index = next(index for index in metadata.storage_data if index.fqn == "model.0.weight")
    location = metadata.storage_data.pop(index)
    append(copied / location.relative_path, location, saved(Evil(str(marker))))
    metadata.storage_data[MetadataIndex(index.fqn)] = location
    metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    write_metadata(copied, metadata)
    assert "model.0.weight" in refuses(copied, ".metadata")
    assert not marker.exists()


@pytest.mark.parametrize("key", ["model.0.weight", MOMENT])
def test_an_entry_that_is_no_tensor_runs_nothing(copied: Path, tmp_path: Path, key: str) -> None:
    marker, metadata = tmp_path / "marker", read_metadata(copied)
    location = next(location for index, location in metadata.storage_data.items() if index.fqn == key)
    append(copied / location.relative_path, location, saved(Evil(str(marker))))
    write_metadata(copied, metadata)
    assert key in refuses(copied, location.relative_path)
    assert not marker.exists()


def test_what_is_not_a_tensor_runs_nothing_unless_the_caller_vouches_for_it(copied: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"state_dict": {"tensors": {}, "others": {}}, "hyper": Evil(str(marker))}, copied / "trainer.pt")
    refuses(copied, "trainer.pt")
    assert not marker.exists()
    sharded.load(copied, weights_only=False)
    assert marker.exists(), "weights_only=False is the way to say that a file is trusted"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 9))])
def test_mutated_metadata_is_refused_or_harmless(copied: Path, tmp_path: Path, seed: int) -> None:
    draw, marker = random.Random(seed), tmp_path / "marker"
    original = (copied / ".metadata").read_bytes()
    names = [text(name) for name in ("Metadata", "MetadataIndex", "Size", "float32", "StorageMeta", "_StorageInfo")]
    modules = [text(name) for name in ("torch", "pathlib", "torch.distributed.checkpoint.metadata")]
    evil = [text(name) for name in ("os.mkdir", "mkdir", "load", "os", "posix", "eval", "builtins", "Path.mkdir")]
    calls = [text(str(marker)) + b"\x85R", b"R", b"b", b"\x81", b"0", b"N", b"\x93"]
    refused = 0
    for _ in range(100):
        data = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            if draw.random() < 0.5:
                old = draw.choice(names + modules)
                data = bytearray(bytes(data).replace(old, draw.choice(evil), draw.choice([1, -1])))
            else:
                place = draw.randrange(len(data))
                data[place : place + draw.randint(0, 3)] = draw.choice([*calls, draw.randbytes(2)])
        (copied / ".metadata").write_bytes(bytes(data))
        module, optimizer = make(1)
        try:
            load(copied, module, optimizer)
        except ValueError as error:
            refused += str(copied) in str(error)
            continue
        assert all(map(torch.isfinite, map(torch.sum, values(module, optimizer))))
    assert refused > 80, "most mutations are noticed"
    assert not marker.exists()


# -- wrong claims ------------------------------------------------------------------------------------------------------


def read_metadata(path: Path) -> Metadata:
    return pickle.loads((path / ".metadata").read_bytes())  # written by this test


def write_metadata(path: Path, metadata: Metadata) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def append(file: Path, location: Any, data: bytes) -> None:
    """Put further bytes into a shard file, and let an entry point to them."""
    location.offset, location.length = file.stat().st_size, len(data)
    with file.open("ab") as stream:
        stream.write(data)


def size(*sizes: int) -> torch.Size:
    return torch.Size(sizes)


CLAIMS: dict[str, Callable[[Any, Any], None]] = {
    "longer than the file": lambda entry, location: setattr(location, "length", 10**9),
    "behind the file's end": lambda entry, location: setattr(location, "offset", 10**9),
    "before the file's start": lambda entry, location: setattr(location, "offset", -5),
    "another file": lambda entry, location: setattr(location, "relative_path", "missing.distcp"),
    "a file elsewhere": lambda entry, location: setattr(location, "relative_path", "../good.ckpt/__0_0.distcp"),
    "an absolute path": lambda entry, location: setattr(location, "relative_path", "/etc/passwd"),
    "a transformation": lambda entry, location: setattr(location, "transform_descriptors", ["stream.zstd"]),
    "a part outside": lambda entry, location: setattr(entry.chunks[0], "sizes", size(9, 4)),
    "a part of other rank": lambda entry, location: setattr(entry.chunks[0], "sizes", size(16)),
    "too little of it": lambda entry, location: setattr(entry.chunks[0], "sizes", size(3, 4)),
    "nothing of it": lambda entry, location: entry.chunks.clear(),
    "a part twice": lambda entry, location: entry.chunks.append(ChunkStorageMetadata(size(0, 0), size(4, 4))),
    "a size that is no number": lambda entry, location: setattr(entry, "size", "4"),
    "no properties": lambda entry, location: setattr(entry, "properties", None),
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("key", ["model.0.weight", MOMENT])
def test_metadata_has_to_fit_the_files(copied: Path, claim: str, key: str) -> None:
    metadata = read_metadata(copied)
    location = next(location for index, location in metadata.storage_data.items() if index.fqn == key)
    CLAIMS[claim](metadata.state_dict_metadata[key], location)
    write_metadata(copied, metadata)
    assert key in refuses(copied, ".metadata")


@pytest.mark.parametrize(
    ("value", "named"),
    [(torch.zeros(3, 4), "(3, 4)"), (torch.zeros(4, 4).double(), "float64"), ({"a": 1}, "dict"), (b"x", "bytes")],
    ids=["another shape", "another dtype", "a dict", "bytes"],
)
def test_entries_have_to_be_the_tensors_that_were_promised(copied: Path, value: Any, named: str) -> None:
    metadata = read_metadata(copied)
    location = next(location for index, location in metadata.storage_data.items() if index.fqn == "model.0.weight")
    append(copied / location.relative_path, location, saved(value))
    write_metadata(copied, metadata)
    message = refuses(copied, location.relative_path)
    assert "model.0.weight" in message
    assert named in message


def test_a_file_that_was_cut_off_is_named(copied: Path) -> None:
    [shards] = copied.glob("*.distcp")
    shards.write_bytes(shards.read_bytes()[:-100])
    assert shards.name in refuses(copied, ".metadata")


def test_parts_of_many_ranks_are_checked_quickly() -> None:
    chunks = [sharded_chunk(rank) for rank in range(4096)]
    assert _gap((4096, 8), chunks) is None
    assert _gap((4096, 8), [*chunks[:-1], chunks[0]]) == "parts that overlap"


def sharded_chunk(rank: int) -> Chunk:
    return Chunk((rank, 0), (1, 8), f"__{rank}_0.distcp", 0, 1)
