"""Layouts fit the world, and ranks and coordinates map onto each other."""

from __future__ import annotations

import pytest

from lightning_effi import Layout
from lightning_effi.layout import AXES, Coordinates


@pytest.mark.parametrize(
    ("world", "settings", "sizes"),
    [
        (1, {"zero_stage": 2}, (1, 1, 1, 1)),
        (4, {"zero_stage": 0}, (1, 4, 1, 1)),
        (4, {"zero_stage": 3}, (1, 1, 4, 1)),
        (4, {"zero_stage": 3, "replicate_size": 2}, (1, 2, 2, 1)),
        (8, {"zero_stage": 1, "data_parallel_size": 8, "replicate_size": 8}, (1, 8, 1, 1)),
        (16, {"zero_stage": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (2, 1, 4, 2)),
        (16, {"zero_stage": 0, "tensor_parallel_size": 4, "pipeline_parallel_size": 2}, (2, 2, 1, 4)),
    ],
)
def test_sizes_follow_from_the_world(world: int, settings: dict[str, int], sizes: tuple[int, ...]) -> None:
    layout = Layout.resolve(world, **settings)
    assert layout.sizes == sizes
    assert layout.world_size == world
    assert layout.data_parallel_size == sizes[1] * sizes[2]


@pytest.mark.parametrize(
    ("world", "settings", "parts"),
    [
        (6, {"tensor_parallel_size": 4}, ["tensor_parallel_size=4", "does not divide the 6 processes"]),
        (4, {"data_parallel_size": 3}, ["data_parallel_size=3", "leave 4", "start 3 processes"]),
        (6, {"replicate_size": 4}, ["replicate_size=4", "1, 2, 3, 6"]),
        (2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, ["= 4 does not divide the 2 processes"]),
        (6, {"data_parallel_size": 4, "replicate_size": 4}, ["data_parallel_size=4", "replicate_size=4"]),
    ],
)
def test_sizes_that_do_not_fit_are_named_together(world: int, settings: dict[str, int], parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Layout.resolve(world, zero_stage=2, **settings)
    for part in parts:
        assert part in str(caught.value)


def test_ranks_and_coordinates_are_each_others_inverse() -> None:
    layout = Layout(pipeline=2, replicate=3, shard=2, tensor=4)
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size == 48
    assert [layout.rank_at(place) for place in places] == list(range(48))
    assert places[1] == Coordinates(pp=0, replicate=0, shard=0, tp=1), "tensor-parallel ranks are neighbours"
    assert Coordinates._fields == AXES


def test_ranks_of_one_replica_load_the_same_batch() -> None:
    layout = Layout(pipeline=2, replicate=1, shard=2, tensor=2)
    assert [layout.data_parallel_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.same_batch(5) == (0, 1, 4, 5)
    assert layout.same_batch(2) == (2, 3, 6, 7)


def test_layout_prints_only_the_axes_in_use() -> None:
    assert str(Layout()) == "one process"
    assert str(Layout(replicate=2, shard=4)) == "replicate 2 x shard 4"
