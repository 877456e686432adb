"""Private names of torch that pipelines rely on."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from lightning_effi.compat import fsdp as fsdp_compat
from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.compat import torch as torch_compat
from tests.harness import run_distributed


def test_fake_tensors_have_shapes_and_take_constants_from_outside() -> None:
    mode, outside = torch_compat.fake_tensor_mode(), torch.ones(4)
    with mode:
        result = nn.Linear(4, 3)(torch.empty(2, 4) + outside)
    assert result.shape == (2, 3)
    assert type(result).__name__ == "FakeTensor"
    assert mode.from_tensor(outside).shape == (4,)


def test_fake_tensors_know_where_they_were_made() -> None:
    modes = torch_compat.fake_tensor_mode(), torch_compat.fake_tensor_mode()
    made = modes[1].from_tensor(torch.ones(4))
    assert torch_compat.fake_mode_of(made) is modes[1]
    assert torch_compat.fake_mode_of(torch.ones(4)) is None


def test_calls_are_shadowed_with_their_hooks() -> None:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    torch_compat.shadow_call(module, lambda *args: "shadow")
    assert module(torch.ones(2)) == "shadow"
    assert torch_compat.call_unshadowed(module, torch.ones(2)).tolist() == [0.0, 0.0]
    torch_compat.unshadow_call(module)
    assert module(torch.ones(2)).tolist() == [0.0, 0.0]


def test_process_that_was_not_seeded_is_known(monkeypatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert lightning_compat.is_seeded()
    pl.seed_everything(5, verbose=False)
    assert lightning_compat.is_seeded()
    torch.manual_seed(6)
    assert not lightning_compat.is_seeded()
    monkeypatch.delenv("PL_GLOBAL_SEED")


@pytest.mark.parametrize(("name", "stages", "kinds"), [("interleaved", 2, "BF"), ("zb1p", 1, "FIW"), ("zbv", 2, "FIW")])
def test_order_of_a_pipeline(name: str, stages: int, kinds: str) -> None:
    orders = torch_compat.pipeline_order(name, 2, stages, 4)
    assert len(orders) == 2
    for actions in orders:
        assert {kind for kind, _, _ in actions} == set(kinds)
        assert len(set(actions)) == len(actions) == len(kinds) * stages * 4


def forward_without_hooks() -> bool:
    layer = nn.Linear(2, 2, bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    fsdp_compat.initialize(layer)
    fsdp_compat.take_off_hooks(layer)
    return not layer._forward_hooks and not layer._forward_pre_hooks


def test_parameter_groups_can_be_driven_by_hand() -> None:
    assert run_distributed(forward_without_hooks, 1) == [True]


def test_clipping_takes_its_norm_from_elsewhere() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    seen: list[float] = []

    def norm(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        seen.append(norm_type)
        assert gradients[0] is parameter.grad
        return torch.tensor(50.0)

    with torch_compat.total_norm_replaced(norm):
        assert float(clip_grad_norm_([parameter], 5.0, norm_type=3)) == 50.0
    assert seen == [3.0]
    torch.testing.assert_close(parameter.grad, torch.tensor([0.3, 0.4]))
    assert float(clip_grad_norm_([parameter], 5.0)) == pytest.approx(0.5)
    with (
        torch_compat.total_norm_replaced(lambda *_: torch.tensor(float("nan"))),
        pytest.raises(RuntimeError, match="non-fin"),
    ):
        clip_grad_norm_([parameter], 5.0, error_if_nonfinite=True)
