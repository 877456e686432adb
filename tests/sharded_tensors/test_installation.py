"""DTensor is taught nothing outside a run, nor anything about other programs' tensors inside one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_effi.sharded_tensors.installation import install
from tests.harness import run_distributed
from tests.harness.fitting import Fit, make_fit
from tests.models.gpt import batches
from tests.sharded_tensors.test_user_code_on_shards import Untied


def program_of_somebody_else(mesh: DeviceMesh) -> dict[str, Any]:
    """What DTensors of a mesh of its own do; without the package each entry is what torch makes of it."""
    rows = torch.arange(8.0).reshape(4, 2).chunk(2)[mesh.get_local_rank()]
    tensor: Any = DTensor.from_local(rows.clone(), mesh, [Shard(0)])
    replica: Any = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    observed: dict[str, Any] = {"norm": str(tensor.norm().placements), "read": tensor.sum().item()}
    for name, use in {
        "write into a row": lambda: tensor[0].fill_(7.0),
        "mixed": lambda: tensor + torch.ones(4, 2),
        "in place": lambda: replica.add_(tensor.sum(0)),
        "format": lambda: f"{tensor.sum():.1f}",
        "tolist": lambda: tensor.tolist(),
        "collective": lambda: dist.all_reduce(tensor, group=mesh.get_group()),
        "data": lambda: setattr(tensor, "data", tensor * 2),
        "draw": lambda: torch.equal(torch.rand_like(tensor).to_local(), torch.rand_like(tensor).to_local()),
    }.items():
        try:
            observed[name] = type(use()).__name__
        except Exception as error:
            observed[name] = f"{type(error).__name__}: {error}"[:80]
    return observed | {"afterwards": tensor.to_local().tolist()}


def hooks_of_the_process() -> dict[str, Any]:
    stock = torch._C._disabled_torch_function_impl
    return {
        "functions": vars(DTensor)["__torch_function__"] is stock or DTensor.__torch_function__ is stock,
        "operators": len(DTensor._op_dispatcher._custom_op_handlers),
        "logging": _ResultMetric.update.__qualname__,
        "attributes": [name for name in ("__format__", "numpy", "tolist") if name in vars(DTensor)],
    }


class ShareTheProcess(Untied):
    """Runs somebody else's program in a hook, and fails where it is told to."""

    def __init__(self, mesh: DeviceMesh, fails: bool = False) -> None:
        super().__init__()
        self.others, self.fails, self.seen = mesh, fails, {}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen = program_of_somebody_else(self.others)
        gradient: Any = self.head.weight.grad
        self.log("norm", gradient.norm())
        assert f"{gradient.norm():.3f}" == f"{gradient.norm().item():.3f}"
        if self.fails:
            raise ArithmeticError("on all ranks")


def before_during_after(layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    observed = [program_of_somebody_else(mesh), hooks_of_the_process()]
    for layout in layouts:
        for fails in (False, True):
            run = Fit(partial(ShareTheProcess, mesh, fails), partial(batches, 1), layout)
            trainer, module, train, _, _ = make_fit(run)
            try:
                trainer.fit(module, train)
            except ArithmeticError:
                assert fails
            assert fails or type(trainer.callback_metrics["norm"]) is Tensor
            observed += [module.seen, program_of_somebody_else(mesh), hooks_of_the_process()]
    return observed


def test_other_programs_in_the_process_see_stock_dtensors() -> None:
    layouts: list[dict[str, Any]] = [{"zero_stage": 2}, {"zero_stage": 0, "tensor_parallel_size": 2}]
    for observed in run_distributed(before_during_after, 2, layouts, timeout=90.0, fresh=True):
        program, process, *later = observed
        assert program["norm"] == "(_NormPartial(2),)"
        assert process["functions"]
        assert process["attributes"] == []
        for seen in later:
            assert seen == (process if "functions" in seen else program)


def installed_twice() -> list[float]:
    first = init_device_mesh("cpu", (2,), mesh_dim_names=("one",))
    second = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    norms = [distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [Shard(0)]).norm() for mesh in (first, second["a"])]
    leave_first, leave_second = install(first), install(second)
    values = [norm.item() for norm in norms]
    leave_first()
    leave_first()
    values += [norm.item() for norm in norms]
    leave_second()
    return [*values, *(norm.item() for norm in norms)]


def test_the_last_run_takes_it_back() -> None:
    for rank, values in enumerate(run_distributed(installed_twice, 2, fresh=True)):
        mine = [3.0, 4.0][rank]  # what torch reads: this rank's term
        assert values == pytest.approx([5.0, 5.0, mine, 5.0, mine, mine])
