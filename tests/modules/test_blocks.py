"""Blocks and parameters are found in modules that nobody prepared."""

from __future__ import annotations

import torch
from torch import nn

from lightning_effi.modules import describe_parameters, find_all_blocks, find_blocks, shared_parts
from lightning_effi.modules.trunk import find_trunk

LARGE = 1 << 8  # a Linear of this width has at least 2**16 parameters


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def names(root: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(root)]


def test_repeated_layers_of_a_list_are_blocks() -> None:
    root = nn.ModuleDict({"layers": nn.ModuleList([layer(), layer()]), "head": nn.Linear(8, 2)})
    assert names(root) == ["layers.0", "layers.1"]


def test_blocks_of_encoder_and_decoder_are_found() -> None:
    found = names(nn.Transformer(8, 2, 2, 3, 16, batch_first=True))
    assert found == ["encoder.layers.0", "encoder.layers.1", *(f"decoder.layers.{i}" for i in range(3))]


def test_a_single_layer_is_no_block() -> None:
    assert names(nn.ModuleDict({"layers": nn.ModuleList([layer()])})) == []


def test_no_block_lies_inside_another() -> None:
    stage = nn.Sequential(layer(), layer())
    root = nn.Module()
    root.stages = nn.ModuleList([stage, nn.Sequential(layer(), layer())])
    assert names(root) == ["stages.0", "stages.1"]


def test_children_of_nested_lists_are_blocks_since_lists_have_no_forward() -> None:
    root = nn.Module()
    root.stages = nn.ModuleList([nn.ModuleList([layer(), layer()]), nn.ModuleList([layer(), layer()])])
    assert names(root) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


def test_single_linear_layers_are_blocks_only_when_large() -> None:
    small, large = (nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)]) for width in (8, LARGE))
    assert names(nn.ModuleDict({"small": small, "large": large})) == ["large.0", "large.1"]


def test_blocks_with_several_names_have_the_first() -> None:
    root = nn.Module()
    root.layers = nn.ModuleList([layer(), layer(), layer()])
    root.again, root.all, root.part = root.layers[0], root.layers, root.layers[1].linear1
    root.parts = nn.ModuleList(each.self_attn for each in root.layers)
    assert names(root) == all_names(root) == ["layers.0", "layers.1", "layers.2"]


def test_blocks_that_share_a_module_are_none() -> None:
    root = nn.Module()
    root.layers = nn.ModuleList([layer(), layer(), layer()])
    root.layers[0].self_attn = root.layers[2].self_attn
    assert names(root) == ["layers.1"]


def test_blocks_may_share_modules_without_parameters() -> None:
    root = nn.ModuleDict({"layers": nn.ModuleList([layer() for _ in range(3)])})
    table = nn.Module()
    table.register_buffer("angles", torch.zeros(4))
    root["activation"], root["table"] = nn.GELU(), nn.Sequential(table, nn.Dropout())
    for each in root["layers"]:
        each.dropout, each.activation, each.table = root["layers"][0].dropout, root["activation"], root["table"]
    assert names(root) == ["layers.0", "layers.1", "layers.2"]
    assert find_trunk(root).blocks == tuple(names(root))
    assert shared_parts(root) == []


def test_what_blocks_share_is_named() -> None:
    root = nn.ModuleDict({"layers": nn.ModuleList([layer() for _ in range(4)])})
    for each in root["layers"][:3]:
        each.norm1 = root["layers"][0].norm1
    assert names(root) == ["layers.3"]
    root["bias"] = nn.Linear(8, 8)
    root["bias"].bias = root["layers"][3].linear2.bias
    assert names(root) == []
    assert shared_parts(root) == [
        "'layers.0.norm1' (LayerNorm) is also 'layers.1.norm1' and 1 more",
        "'layers.3.linear2.bias' is also 'bias.bias'",
    ]


def all_names(root: nn.Module) -> list[str]:
    return [block.name for block in find_all_blocks(root)]


def test_all_blocks_are_those_that_stand_twice_as_well() -> None:
    shared = layer()
    root = nn.Module()
    root.layers = nn.ModuleList([shared, layer(), shared])
    root.again = shared
    assert all_names(root) == ["layers.0", "layers.1"]


def test_all_blocks_are_the_only_ones_of_their_lists_as_well() -> None:
    root = nn.Module()
    root.outer, root.layers = nn.ModuleList([nn.ModuleList([layer()])]), nn.ModuleList([layer()])
    assert names(root) == []
    assert all_names(root) == ["outer.0.0", "layers.0"]


def test_all_blocks_are_children_of_one_class_where_there_are_no_lists() -> None:
    root = nn.Module()
    root.first, root.second, root.head = layer(), layer(), nn.Linear(8, 2)
    assert all_names(root) == ["first", "second"]
    root.layers = nn.ModuleList([layer(), layer()])
    assert all_names(root) == ["layers.0", "layers.1"]


def test_all_blocks_may_share_parameters_with_each_other_only() -> None:
    root = nn.Module()
    root.layers = nn.ModuleList([layer(), layer(), layer(), layer()])
    root.layers[1].linear1.weight = root.layers[0].linear1.weight
    root.layers[2].self_attn = root.layers[3].self_attn
    assert names(root) == []
    assert len(all_names(root)) == 4
    root.head = nn.Linear(8, 16)
    root.head.weight = root.layers[0].linear1.weight
    root.layers[3].linear2.bias = root.layers[2].linear1.bias
    assert all_names(root) == []


def test_module_that_shares_a_parameter_with_another_is_no_block() -> None:
    root = nn.ModuleDict({"layers": nn.ModuleList([layer() for _ in range(4)])})
    root["layers"][0].linear1.weight = root["layers"][3].linear1.weight
    assert names(root) == ["layers.1", "layers.2"]


def test_parameters_are_described_once_with_all_their_names() -> None:
    root = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    root["head"].weight = root["embedding"].weight
    root["norm"] = nn.LayerNorm(3).to(torch.bfloat16).requires_grad_(False)
    embedding, weight, bias = describe_parameters(root)
    assert (embedding.name, embedding.also_named) == ("embedding.weight", ("head.weight",))
    assert (embedding.shape, embedding.numel, embedding.bytes, embedding.trainable) == ((5, 3), 15, 60, True)
    assert (weight.name, weight.bytes, weight.trainable) == ("norm.weight", 6, False)
    assert bias.also_named == ()
