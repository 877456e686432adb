"""Batches are cut by rows, and nothing else is."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_effi.microbatches.split import Rows, count_rows, cut, split, tensors

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: torch.Tensor
    label: torch.Tensor
    source: str = "web"


def rows_of(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(("rows", "count", "sizes"), [(7, 3, [3, 2, 2]), (8, 4, [2] * 4), (2, 5, [1, 1]), (5, 1, [5])])
def test_sizes_differ_by_one_row_at_most(rows: int, count: int, sizes: list[int]) -> None:
    pieces = split(torch.arange(rows), rows, count)
    assert [piece.rows for piece in pieces] == sizes
    assert torch.cat([piece.data for piece in pieces]).tolist() == list(range(rows))


def test_everything_that_has_rows_is_cut_and_the_rest_is_not() -> None:
    batch = {
        "ids": torch.arange(12).view(4, 3),
        "meta": {"names": ["a", "b", "c", "d"], "k": 3},
        "opt": None,
        "len": [5, 6, 7, 8],
        "w": torch.tensor(2.0),
    }
    piece = cut(batch, count_rows(batch).count, 1, 3).data
    assert rows_of(piece["ids"]) == [[3, 4, 5], [6, 7, 8]]
    assert piece["meta"] == {"names": ["b", "c"], "k": 3}
    assert piece["opt"] is None
    assert piece["len"] == [6, 7]
    assert piece["w"] == 2.0
    assert batch["meta"]["names"] == ["a", "b", "c", "d"]


def test_containers_keep_their_types() -> None:
    x, y = torch.arange(4), torch.arange(4) * 10
    assert isinstance(cut(Pair(x, y), 4, 0, 2).data, Pair)
    assert rows_of(cut(Pair(x, y), 4, 0, 2).data.y) == [0, 10]
    sample = cut(Sample(x, y), 4, 2, 4).data
    assert (type(sample), sample.source, rows_of(sample.label)) == (Sample, "web", [20, 30])
    assert isinstance(cut(OrderedDict(x=x), 4, 0, 1).data, OrderedDict)
    tokens, names = cut((x, ["p", "q", "r", "s"]), 4, 1, 2).data
    assert (rows_of(tokens), names) == ([1], ["q"])


def test_batch_encoding_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(6).view(3, 2)})
    piece = cut(batch, count_rows(batch).count, 2, 3).data
    assert isinstance(piece, transformers.BatchEncoding)
    assert rows_of(piece["input_ids"]) == [[4, 5]]
    assert len(batch["input_ids"]) == 3


def test_tensors_of_another_first_dim_are_named_and_stay_whole() -> None:
    batch = {"ids": torch.zeros(4, 6), "labels": torch.zeros(4, 6), "mask": torch.zeros(6, 6)}
    assert count_rows(batch) == Rows(4, ("mask",))
    assert cut(batch, 4, 0, 1).data["mask"].shape == (6, 6)


def test_no_guess_between_two_sizes() -> None:
    with pytest.raises(ValueError, match="'0' 4, '1' 6"):
        count_rows((torch.zeros(4, 6), torch.zeros(6, 6)))
    with pytest.raises(ValueError, match="holds no tensor"):
        count_rows({"k": 3})


def test_names_of_tensors() -> None:
    assert list(tensors({"a": [torch.zeros(1), {"b": torch.zeros(1)}]})) == ["a.0", "a.1.b"]
