"""Each private name of torch and Lightning that the package relies on still does what it is relied on for.

A release that renames or changes one fails here by name: the tests are the to-do list of an upgrade.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_effi import EffiStrategy
from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import fsdp as fsdp_compat
from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.compat import torch as torch_compat
from lightning_effi.modules.intact import IntactModule
from lightning_effi.sharded_tensors.stale_parameters import EarlierParameter
from tests.harness import WorkerEnvironment, make_trainer, run_distributed, run_isolated

# rooms that test what they rely on themselves
ELSEWHERE = ("pipeline_parallel/test_compat.py", "tensor_parallel/test_private_names.py")
_covered: set[str] = set()


def relies_on(function: str, private: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Names the function of ``compat`` that a test exercises (``fsdp.groups``) and the private names behind it."""
    _covered.add(function)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def named(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                versions = f"torch {torch.__version__} and Lightning {lightning.__version__}"
                pytest.fail(f"compat.{function} relies on {private}, which fails with {versions}: {error!r}")

        return named

    return decorate


def test_every_function_is_covered() -> None:
    ours = {
        f"{module.__name__.rsplit('.', 1)[1]}.{name}"
        for module in (dtensor_compat, fsdp_compat, lightning_compat, torch_compat)
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and not name.startswith("_") and inspect.getmodule(value) is module
    }
    tests = [Path(__file__).parent / name for name in ELSEWHERE]
    used = [re.findall(r"(dtensor|fsdp|lightning|torch)_compat\.([a-z]\w+)", test.read_text()) for test in tests]
    assert ours == _covered.union(*({".".join(found) for found in names} for names in used))


# --- one process ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


class Counts(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@relies_on("torch.function_mode_left", "overrides._get_current_function_mode, overrides._pop_mode_temporarily")
def test_the_innermost_function_mode_is_left_for_a_while() -> None:
    outer, inner = Counts(), Counts()
    with outer, inner:
        with torch_compat.function_mode_left(inner):
            torch.ones(2).add(1)
        left = inner.calls, outer.calls
        with torch_compat.function_mode_left(outer):  # not the innermost: sees all the same
            torch.ones(2).add(1)
    assert left[0] == 0
    assert left[1] > 0
    assert inner.calls > 0
    assert outer.calls > left[1]


@relies_on("torch.autocast_dtype", "is_autocast_enabled of one device")
def test_autocast_tells_its_dtype() -> None:
    assert torch_compat.autocast_dtype() is None
    with torch.autocast("cpu", torch.bfloat16):
        assert torch_compat.autocast_dtype() is torch.bfloat16
    assert torch_compat.autocast_dtype() is None


@relies_on("lightning.belonging", "the two names of the Trainer's package")
def test_parts_say_to_which_trainer_they_belong() -> None:
    shown = lightning_compat.belonging("EffiStrategy")
    assert shown.startswith("<EffiStrategy of lightning_effi, for lightning.pytorch.Trainer; ")
    assert shown.endswith("lightning_effi.pytorch_lightning has it for pytorch_lightning.Trainer>")


@relies_on("torch.output_size", "Node._input_metadata")
def test_nodes_know_the_size_of_what_they_gave() -> None:
    parts = torch.randn(2, 6, requires_grad=True).exp().split(4, dim=1)
    node = parts[0].grad_fn
    assert [torch_compat.output_size(node, i) for i in range(2)] == [8, 4]
    assert torch_compat.output_size((parts[0].mean() * 2).grad_fn, 0) == 1


@relies_on("torch.saved", "Node._saved_*")
def test_nodes_show_what_they_keep() -> None:
    labels = torch.tensor([1, 2, 1])
    node = nn.functional.cross_entropy(torch.randn(3, 5, requires_grad=True), labels, ignore_index=1).grad_fn
    assert torch_compat.saved(node, "total_weight").item() == 1.0
    assert torch_compat.saved(node, "reduction") == 1
    divided = (torch.ones(2, requires_grad=True).sum() / torch.tensor(4)).grad_fn
    assert torch_compat.saved(divided, "other").item() == 4
    assert torch_compat.saved(divided, "reduction") is None


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


@pytest.fixture
def network(mesh: DeviceMesh) -> Network:
    """Two FSDP2 groups, initialised and gathered."""
    return gathered(mesh["shard"])


def gathered(mesh: DeviceMesh) -> Network:
    torch.manual_seed(0)
    module = Network()
    fully_shard(module.block, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    fsdp_compat.initialize(module)
    for group in fsdp_compat.groups(module):
        group.unshard()
        group.wait_for_unshard()
    return module


def first_param(network: Network) -> Any:
    return fsdp_compat.params(fsdp_compat.groups(network)[-1])[0]


@relies_on("torch.flatten_mesh", "DeviceMesh._flatten")
def test_mesh_axes_become_one(mesh: DeviceMesh) -> None:
    flat = torch_compat.flatten_mesh(mesh["replicate", "shard"], "both")
    assert (flat.ndim, flat.size(), flat.mesh_dim_names) == (1, 1, ("both",))
    assert dist.get_process_group_ranks(flat.get_group()) == [0]


@relies_on("torch.in_backward", "torch._C._current_graph_task_id")
def test_backward_is_told_apart_from_forward() -> None:
    x = torch.ones(1, requires_grad=True)
    seen = []
    x.register_hook(lambda _gradient: seen.append(torch_compat.in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert torch_compat.in_backward() is False


@relies_on("fsdp.groups", "FSDPModule._get_fsdp_state()._fsdp_param_groups")
def test_groups_of_a_sharded_module_are_found_once(network: Network) -> None:
    groups = fsdp_compat.groups(nn.ModuleList([network, network]))
    assert len(groups) == 2
    names = {param._param_fqn for group in groups for param in group.fsdp_params}
    assert names == {"block.weight", "block.bias", "head.weight", "head.bias"}


@relies_on("fsdp.initialize", "FSDPState._lazy_init")
def test_root_is_decided_before_the_first_forward(mesh: DeviceMesh) -> None:
    module = Network()
    fully_shard(module.block, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    fsdp_compat.initialize(module)
    assert module._get_fsdp_state()._is_root is True
    assert module.block._get_fsdp_state()._is_root is False


@pytest.mark.parametrize("method", ["post_backward", "wait_for_unshard", "_to_sharded", "_init_mp_dtypes"])
@relies_on("fsdp.override", "methods of FSDPParamGroup that may be shadowed on the instance")
def test_method_of_one_group_is_shadowed(network: Network, method: str) -> None:
    first, second = fsdp_compat.groups(network)
    fsdp_compat.override(first, method, lambda: "ours")
    assert getattr(first, method)() == "ours"
    assert getattr(second, method).__func__ is getattr(type(second), method)
    with pytest.raises(AttributeError, match="no_such_method"):
        fsdp_compat.override(first, "no_such_method", print)


@relies_on("fsdp.override", "FSDP2 calling wait_for_unshard and post_backward through the instance")
def test_shadowed_methods_are_those_that_fsdp_calls(network: Network) -> None:
    calls = []
    for group in fsdp_compat.groups(network):
        for method in ("wait_for_unshard", "post_backward"):
            original = getattr(group, method)

            def noted(*args: Any, method: str = method, original: Any = original) -> None:
                calls.append(method)
                original(*args)

            fsdp_compat.override(group, method, noted)
    network(torch.ones(1, 4)).sum().backward()
    assert calls.count("wait_for_unshard") >= 2
    assert calls.count("post_backward") >= 2


@relies_on("fsdp.params", "FSDPParamGroup.fsdp_params")
def test_parameters_of_a_group_come_in_registration_order(network: Network) -> None:
    params = fsdp_compat.params(fsdp_compat.groups(network)[-1])
    assert [param._module_info.param_name for param in params] == ["weight", "bias"]


@relies_on("fsdp.sharded_param", "FSDPParam.sharded_param")
def test_sharded_parameter_is_what_the_module_shows_at_rest(network: Network) -> None:
    sharded = fsdp_compat.sharded_param(first_param(network))
    network.block.reshard()
    assert isinstance(sharded, DTensor)
    assert network.block.weight is sharded


@relies_on("fsdp.unsharded_param", "FSDPParam._unsharded_param")
def test_full_parameter_is_what_the_module_shows_when_gathered(mesh: DeviceMesh, network: Network) -> None:
    full = fsdp_compat.unsharded_param(first_param(network))
    assert network.block.weight is full
    assert not isinstance(full, DTensor)
    fresh = Network()
    fully_shard(fresh, mesh=mesh["shard"])
    assert fsdp_compat.unsharded_param(first_param(fresh)) is None


def backward_without_reduction(network: Network) -> Any:
    for group in fsdp_compat.groups(network):
        fsdp_compat.configure_backward(group, reduce=False, reshard=False)
    network(torch.ones(1, 4)).sum().backward()
    return first_param(network)


@relies_on("fsdp.has_unreduced_grad", "FSDPParam.unsharded_accumulated_grad")
@relies_on("fsdp.configure_backward", "FSDPParamGroup.reduce_grads, all_reduce_grads, reshard_after_backward")
def test_gradient_waits_where_backward_does_not_reduce(network: Network) -> None:
    param = first_param(network)
    assert not fsdp_compat.has_unreduced_grad(param)
    backward_without_reduction(network)
    assert fsdp_compat.has_unreduced_grad(param)
    assert fsdp_compat.sharded_param(param).grad is None
    assert not any(group.is_sharded for group in fsdp_compat.groups(network))
    for group in fsdp_compat.groups(network):
        fsdp_compat.configure_backward(group, reduce=True, reshard=True)
    network(torch.ones(1, 4)).sum().backward()
    assert not fsdp_compat.has_unreduced_grad(param)
    expected = 2 * network.head.weight.full_tensor().sum(dim=0)[:, None].expand(4, 4)
    torch.testing.assert_close(fsdp_compat.sharded_param(param).grad.full_tensor(), expected)


@relies_on("fsdp.scale_unreduced_grad", "FSDPParam.unsharded_accumulated_grad")
def test_unreduced_gradient_is_multiplied(network: Network) -> None:
    param = backward_without_reduction(network)
    before = [g.clone() for g in unreduced_gradients(param)]
    fsdp_compat.scale_unreduced_grad(param, 0.5)
    assert before
    for old, new in zip(before, unreduced_gradients(param), strict=True):
        torch.testing.assert_close(new, 0.5 * old)


def unreduced_gradients(param: Any) -> list[Tensor]:
    return [g for g in (param.unsharded_accumulated_grad, param.unsharded_param.grad) if g is not None]


@relies_on("fsdp.drop_unreduced_grad", "FSDPParam.unsharded_accumulated_grad")
def test_unreduced_gradient_is_forgotten(network: Network) -> None:
    param = backward_without_reduction(network)
    fsdp_compat.drop_unreduced_grad(param)
    assert not fsdp_compat.has_unreduced_grad(param)


@relies_on("fsdp.zero_unreduced_grad", "FSDPParam._unsharded_param")
def test_absent_gradient_becomes_zeros_and_a_present_one_stays(network: Network) -> None:
    param = first_param(network)
    fsdp_compat.zero_unreduced_grad(param)
    assert torch.equal(fsdp_compat.unsharded_param(param).grad, torch.zeros(4, 4))
    fsdp_compat.drop_unreduced_grad(param)
    backward_without_reduction(network)
    before = fsdp_compat.unsharded_param(param).grad
    fsdp_compat.zero_unreduced_grad(param)
    assert fsdp_compat.unsharded_param(param).grad is before


@relies_on("fsdp.set_compute_dtypes", "FSDPParamGroup._init_mp_dtypes and FSDPParam.init_dtype_attrs")
@relies_on("fsdp.upcast_unreduced_grad", "FSDPParam.to_accumulated_grad_if_needed")
def test_each_parameter_is_gathered_in_its_own_dtype(mesh: DeviceMesh) -> None:
    module = nn.Linear(4, 4)
    fully_shard(module, mesh=mesh["shard"])
    [group] = fsdp_compat.groups(module)
    fsdp_compat.set_compute_dtypes(group, [torch.bfloat16, None], torch.float32)
    fsdp_compat.initialize(module)
    module.unshard()
    assert (module.weight.dtype, module.bias.dtype) == (torch.bfloat16, torch.float32)
    param = fsdp_compat.params(group)[0]
    full = fsdp_compat.unsharded_param(param)
    full.grad = torch.ones_like(full)
    fsdp_compat.upcast_unreduced_grad(param)
    assert param.unsharded_accumulated_grad.dtype == torch.float32
    assert full.grad is None


@relies_on("fsdp.sync_requires_grad", "FSDPParam._unsharded_param")
def test_full_parameter_follows_the_sharded_ones_requires_grad(network: Network) -> None:
    param = first_param(network)
    fsdp_compat.sharded_param(param).requires_grad_(False)
    fsdp_compat.sync_requires_grad(param)
    assert network.block.weight.requires_grad is False


@relies_on("fsdp.own_class", "the order of bases of the class that fully_shard makes")
@relies_on("fsdp.original_class", "the order of bases of the class that fully_shard makes")
def test_sharded_class_has_the_original_name_and_fsdps_own_stays(network: Network) -> None:
    shared, made = type(network), {}
    fsdp_compat.own_class(network, made)
    assert type(network).__name__ == "Network"
    assert type(network) is made[shared]
    assert isinstance(network, FSDPModule)
    assert shared.__name__ == "FSDPNetwork"
    assert fsdp_compat.original_class(network) is Network


@relies_on("fsdp.attribute_names", "torch.distributed._composable.contract.STATE_KEY")
@relies_on("fsdp.hook_keys", "FSDPState._pre_forward_hook_handle")
@relies_on("fsdp.is_involved", "FSDPModule")
def test_what_sharding_puts_into_a_module_is_known(network: Network) -> None:
    plain = Network()
    assert vars(network).keys() - vars(plain).keys() <= fsdp_compat.attribute_names()
    keys = fsdp_compat.hook_keys(network)
    for module in network.modules():
        hooks = [value for name, value in vars(module).items() if "hooks" in name and isinstance(value, dict)]
        assert {key for found in hooks for key in found} <= keys
    assert fsdp_compat.is_involved(network)
    assert not fsdp_compat.is_involved(plain)


@relies_on("fsdp.post_backward_done", "FSDPParamGroup.finalize_backward")
def test_reduction_run_by_hand_is_finished(network: Network) -> None:
    group = fsdp_compat.groups(network)[-1]
    for param in fsdp_compat.params(group):
        fsdp_compat.zero_unreduced_grad(param)
    group.post_backward()
    fsdp_compat.post_backward_done(group)
    assert torch.equal(fsdp_compat.sharded_param(first_param(network)).grad.full_tensor(), torch.zeros(4, 4))


@relies_on("fsdp.forget_forward_order", "FSDPCommContext.post_forward_order, FSDPParamGroup._post_forward_indices")
@relies_on("fsdp.reset_idle", "FSDPParamGroup._training_state")
def test_forwards_without_backward_leave_no_trace(network: Network) -> None:
    groups = fsdp_compat.groups(network)
    network(torch.ones(1, 4))
    assert groups[0].comm_ctx.post_forward_order
    for group in groups:
        fsdp_compat.reset_idle(group)
        fsdp_compat.forget_forward_order(group)
    assert not groups[0].comm_ctx.post_forward_order
    assert not any(group._post_forward_indices for group in groups)
    assert {group._training_state.name for group in groups} == {"IDLE"}
    network(torch.ones(1, 4)).sum().backward()


@relies_on("fsdp.undo", "handles of FSDPState, FSDPParamGroup and FSDPParam, and _module_state_mapping")
def test_sharded_module_becomes_an_ordinary_one_again(network: Network) -> None:
    for group in fsdp_compat.groups(network):
        group._to_sharded()
    values = {name: parameter.full_tensor().clone() for name, parameter in network.named_parameters()}
    full = {id(parameter): parameter.full_tensor() for parameter in network.parameters()}
    fsdp_compat.undo(network, full)
    assert (type(network), type(network.block)) == (Network, nn.Linear)
    assert all(type(parameter) is nn.Parameter for parameter in network.parameters())
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, values[name])
    network(torch.ones(1, 4)).sum().backward()
    assert network.block.weight.grad is not None
    network.load_state_dict(network.state_dict())
    fully_shard(network, mesh=init_device_mesh("cpu", (1,)))  # may be sharded again


@relies_on("fsdp.forget", "_module_state_mapping, process groups of FSDPMeshInfo")
@relies_on("fsdp.is_known", "_module_state_mapping")
def test_module_that_is_put_back_may_be_sharded_again(mesh: DeviceMesh) -> None:
    network = Network()
    parameters, intact = dict(network.named_parameters()), IntactModule(network)
    fully_shard(network, mesh=mesh["shard"])
    assert fsdp_compat.is_known(network)
    intact.put_back()
    assert not fsdp_compat.is_known(network)
    assert type(network) is Network
    assert dict(network.named_parameters()) == parameters
    fully_shard(network, mesh=mesh["shard"])


def groups_apart() -> list[tuple[str, bool, Any]]:
    sizes = ((1, 2), (2, 1))
    meshes = [torch_compat.mesh_apart("cpu", size, ("a", "b"), timedelta(seconds=7)) for size in sizes]
    groups = [mesh[name].get_group() for mesh in meshes for name in ("a", "b")]
    groups.append(torch_compat.flatten_mesh(meshes[0]["a", "b"], "both", timedelta(seconds=7)).get_group())
    cpu = torch.device("cpu")
    return [(dist.get_backend(g), g is not dist.group.WORLD, g._get_backend(cpu).options._timeout) for g in groups]


@relies_on("torch.mesh_apart", "backend_override of init_device_mesh, set_timeout")
def test_groups_of_a_mesh_are_not_the_default_group_and_have_a_timeout() -> None:
    assert run_distributed(groups_apart, 2, fresh=True) == [[("gloo", True, timedelta(seconds=7))] * 5] * 2


@relies_on("dtensor.local_tensor", "DTensor._local_tensor")
@relies_on("dtensor.wrap_local", "DTensor.from_local with shape and stride")
def test_local_part_is_taken_out_and_wrapped_without_a_copy(mesh: DeviceMesh) -> None:
    sharded = distribute_tensor(torch.arange(6.0).view(3, 2), mesh["shard"], [Shard(0)])
    local = dtensor_compat.local_tensor(sharded)
    assert type(local) is Tensor
    wrapped = dtensor_compat.wrap_local(local, sharded)
    assert (wrapped.shape, wrapped.placements) == (sharded.shape, sharded.placements)
    assert wrapped._local_tensor.data_ptr() == local.data_ptr()
    assert dtensor_compat.local_tensor(local) is local


@relies_on("lightning.default_backend", "lightning.fabric.utilities.distributed")
def test_backend_follows_the_device() -> None:
    assert lightning_compat.default_backend(torch.device("cpu")) == "gloo"
    assert lightning_compat.default_backend(torch.device("cuda", 0)) == "nccl"


@relies_on("lightning.reset_seed", "the environment variables of seed_everything")
def test_seed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    lightning_compat.reset_seed()
    assert torch.initial_seed() == 11


@relies_on("lightning.set_rank_zero", "rank_zero_only.rank of lightning.fabric and lightning_utilities")
def test_rank_decides_what_rank_zero_only_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.utilities import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 0)
    lightning_compat.set_rank_zero(1)
    assert rank_zero_only(lambda: "ran")() is None
    lightning_compat.set_rank_zero(0)
    assert rank_zero_only(lambda: "ran")() == "ran"


@relies_on("lightning.popen_launcher", "_SubprocessScriptLauncher")
def test_popen_launcher_knows_how_many_processes_to_start() -> None:
    launcher = lightning_compat.popen_launcher(LightningEnvironment(), 2, 3)
    assert (launcher.num_processes, launcher.num_nodes, launcher.procs) == (2, 3, [])
    assert launcher.is_interactive_compatible is False


@relies_on("lightning.is_interactive", "lightning.fabric.utilities.imports._IS_INTERACTIVE")
def test_a_test_run_is_not_a_notebook() -> None:
    assert lightning_compat.is_interactive() is False


@relies_on("lightning.optimizers_to_device", "lightning.fabric.utilities.optimizer._optimizers_to_device")
def test_optimizer_states_follow_the_device() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = torch.ones(2)
    lightning_compat.optimizers_to_device([optimizer], torch.device("meta"))
    assert optimizer.state[parameter]["momentum_buffer"].is_meta


@relies_on("lightning.unwrap_lightning_optimizer", "LightningOptimizer._optimizer")
def test_lightning_optimizer_is_unwrapped() -> None:
    from lightning.pytorch.core.optimizer import LightningOptimizer

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert lightning_compat.unwrap_lightning_optimizer(LightningOptimizer(optimizer)) is optimizer
    assert lightning_compat.unwrap_lightning_optimizer(optimizer) is optimizer


class MarksSigterm(pl.Callback):
    """Notes what Lightning registered for SIGTERM while it trains."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        handlers = lightning_compat.registered_signal_handler(signal.SIGTERM)
        self.notifiers = [lightning_compat.is_sigterm_notifier(handler) for handler in handlers]
        lightning_compat.mark_sigterm(trainer)


@relies_on("lightning.registered_signal_handler", "_HandlersCompose.signal_handlers")
@relies_on("lightning.is_sigterm_notifier", "_SignalConnector._sigterm_notifier_fn")
@relies_on("lightning.mark_sigterm", "Trainer._signal_connector.received_sigterm")
def test_sigterm_handlers_of_lightning_are_found_and_its_flag_ends_the_run() -> None:
    watch = MarksSigterm()
    trainer = make_trainer(None, 1, callbacks=[watch], max_epochs=1)
    with pytest.raises(SIGTERMException):
        trainer.fit(Logs(), torch.utils.data.DataLoader(torch.ones(4, 1)))
    assert watch.notifiers.count(True) == 1
    assert trainer.global_step == 1
    assert lightning_compat.registered_signal_handler(signal.SIGTERM) is None


@relies_on("lightning.before_training_batches", "_TrainingEpochLoop._broadcast_sigterm_tensor")
def test_ranks_are_asked_before_each_batch() -> None:
    loop = make_trainer(None, 1).fit_loop.epoch_loop
    original, asked = loop._broadcast_sigterm_tensor, []
    undo = lightning_compat.before_training_batches(loop.trainer, lambda: asked.append(None))
    loop._broadcast_sigterm_tensor()  # in several processes; tests/loop/test_signals.py shows when
    undo()
    assert len(asked) == 1
    assert loop._broadcast_sigterm_tensor == original


@relies_on("lightning.slurm_requeue_signal", "Trainer._accelerator_connector.cluster_environment")
def test_requeue_signal_is_that_of_the_slurm_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lightning_compat.slurm_requeue_signal(make_trainer(None, 1)) is None
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    for requeue, expected in ((True, signal.SIGUSR2), (False, None)):
        environment = SLURMEnvironment(auto_requeue=requeue, requeue_signal=signal.SIGUSR2)
        assert lightning_compat.slurm_requeue_signal(make_trainer(None, 1, plugins=[environment])) == expected


@relies_on("lightning.allow_compiled_modules", "lightning.pytorch.trainer.trainer._verify_strategy_supports_compile")
def test_compiled_modules_are_let_through_for_our_strategies_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer import trainer as trainer_module

    def refuse(model: Any, strategy: Any) -> None:
        raise RuntimeError("unsupported")

    monkeypatch.setattr(trainer_module, "_verify_strategy_supports_compile", refuse)
    ours, others = [SingleDeviceStrategy(), SingleDeviceStrategy()], SingleDeviceStrategy()
    for strategy in ours:
        lightning_compat.allow_compiled_modules(strategy)
    for strategy in ours:
        trainer_module._verify_strategy_supports_compile(None, strategy)
    with pytest.raises(RuntimeError, match="unsupported"):
        trainer_module._verify_strategy_supports_compile(None, others)
    assert "_verify_strategy_supports_compile(" in inspect.getsource(trainer_module.Trainer)
    del strategy
    ours.pop()
    assert trainer_module._verify_strategy_supports_compile is not refuse
    ours.pop()
    assert trainer_module._verify_strategy_supports_compile is refuse


@relies_on("lightning.around_zero_grad", "_AutomaticOptimization._on_before_zero_grad")
def test_hooks_between_step_and_backward_run_in_a_context() -> None:
    inside: list[bool] = [False]
    seen: list[tuple[str, bool]] = []

    @contextmanager
    def context() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    class Watched(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(("step", inside[0]))
            return super().training_step(batch, batch_idx)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            seen.append(("before", inside[0]))

        def optimizer_zero_grad(self, *args: Any) -> None:
            seen.append(("zero_grad", inside[0]))

        def on_before_backward(self, loss: Any) -> None:
            seen.append(("backward", inside[0]))

    trainer = make_trainer(None, 1, max_steps=1, limit_val_batches=0)
    undo = lightning_compat.around_zero_grad(trainer, context)
    trainer.fit(Watched())
    assert seen == [("step", False), ("before", True), ("zero_grad", True), ("backward", False)]
    undo()
    assert "_on_before_zero_grad" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


@relies_on("torch.unscale_and_check", "torch._amp_foreach_non_finite_check_and_unscale_")
def test_tensors_are_divided_and_checked_in_one_go() -> None:
    gradients, overflow = [torch.tensor([2.0, 4.0]), torch.tensor([8.0])], torch.zeros(())
    torch_compat.unscale_and_check(gradients, overflow, torch.tensor(0.5))
    assert [g.tolist() for g in gradients] == [[1.0, 2.0], [4.0]]
    assert overflow == 0
    torch_compat.unscale_and_check([torch.tensor([1.0, float("nan")])], overflow, torch.tensor(0.5))
    assert overflow == 1


@relies_on("lightning.hold_back_schedulers", "_TrainingEpochLoop.update_lr_schedulers")
def test_step_schedulers_wait_and_epoch_schedulers_do_not() -> None:
    trainer, calls, held = make_trainer(None, 1), [], [True]
    loop = trainer.fit_loop.epoch_loop
    loop.update_lr_schedulers = lambda interval, update_plateau_schedulers: calls.append(interval)
    undo = lightning_compat.hold_back_schedulers(trainer, lambda: held[0])
    for interval in ("step", "epoch"):
        loop.update_lr_schedulers(interval, update_plateau_schedulers=False)
    held[0] = False
    loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    assert calls == ["epoch", "step"]
    undo()
    assert "update_lr_schedulers" not in vars(loop)
    assert {"interval", "update_plateau_schedulers"} <= set(inspect.signature(loop.update_lr_schedulers).parameters)


@relies_on("lightning.precision_flag", "Trainer._accelerator_connector._precision_flag")
def test_precision_flag_is_read_back() -> None:
    assert lightning_compat.precision_flag(make_trainer(None, 1, precision="bf16-mixed")) == "bf16-mixed"
    assert lightning_compat.precision_flag(make_trainer(None, 1)) == "32-true"


class Logs(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.keys: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).sum()
        self.log("synced", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("own", loss, on_step=False, on_epoch=True, sync_dist=False)
        self.log("first", loss, on_step=False, on_epoch=True, sync_dist=True, rank_zero_only=True)
        self.keys = [key.rpartition(".")[2] for key in lightning_compat.synced_log_keys(self.trainer)]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# --- two processes --------------------------------------------------------------------------------------------------


def lightning_and_ddp_on_two_ranks() -> dict[str, Any]:
    rank, group = dist.get_rank(), dist.group.WORLD
    lightning_compat.init_process_group(WorkerEnvironment(), "gloo", timedelta(seconds=20), None)
    values = [torch.full((2,), float(rank)), torch.full((3,), 10.0 * rank)]
    torch_compat.broadcast_module_states(values, group, src=1)
    mine = torch.tensor([1.0 + rank])
    gathered = lightning_compat.all_gather_batch(mine, group, False)
    mean = lightning_compat.sync_reduce(mine.clone(), group, "mean")
    return {"broadcast": values, "gathered": gathered, "mean": mean, "world": dist.get_world_size()}


def default_group_of_one() -> dict[str, Any]:
    world, rank = dist.group.WORLD, dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    mesh = init_device_mesh("cpu", (2,))
    value, received = torch.tensor(1.0 + rank), torch.tensor(1.0 + rank)
    with torch_compat.default_group(alone):
        dist.all_reduce(value)
        dist.broadcast(received, src=0)
        inside = (dist.get_world_size(), dist.get_rank(), dist.get_rank(world), dist.get_rank(mesh.get_group()))
        meshes = (mesh.get_rank(), mesh.get_local_rank(0), dist.group.WORLD is alone)
    after = (dist.get_world_size(), dist.get_rank(), dist.group.WORLD is world)
    return {"values": (float(value), float(received)), "inside": inside, "meshes": meshes, "after": after}


@relies_on("torch.default_group", "torch.distributed.GroupMember.WORLD")
def test_default_group_is_another_one_inside() -> None:
    for rank, found in enumerate(run_distributed(default_group_of_one, 2, fresh=True)):
        assert found["values"] == (1.0 + rank, 1.0 + rank)
        assert found["inside"] == (1, 0, rank, rank)
        assert found["meshes"] == (rank, rank, True)
        assert found["after"] == (2, rank, True)


@relies_on("lightning.init_process_group", "lightning.fabric.utilities.distributed._init_dist_connection")
@relies_on("torch.broadcast_module_states", "torch.distributed._broadcast_coalesced")
@relies_on("lightning.all_gather_batch", "lightning.fabric.utilities.distributed._all_gather_ddp_if_available")
@relies_on("lightning.sync_reduce", "lightning.fabric.utilities.distributed._sync_ddp_if_available")
def test_collectives_of_lightning_and_ddp_give_their_values() -> None:
    for result in run_distributed(lightning_and_ddp_on_two_ranks, 2, fresh=True):
        assert [value.tolist() for value in result["broadcast"]] == [[1.0] * 2, [10.0] * 3]
        assert result["gathered"].tolist() == [[1.0], [2.0]]
        assert result["mean"].tolist() == [1.5]
        assert result["world"] == 2


def names_while_logging_under_ddp() -> list[str]:
    module = Logs()
    trainer = make_trainer("ddp", 2, max_steps=1, max_epochs=1)
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(2, 1)))
    return module.keys


@relies_on("lightning.synced_log_keys", "Trainer._results and _ResultMetric.meta.sync.should")
def test_names_of_synced_values_are_known_while_logging() -> None:
    assert run_distributed(names_while_logging_under_ddp, 2, fresh=True) == [["synced"]] * 2


class BackwardInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.wrapper: list[nn.Module] = []

    def forward(self, x: Tensor) -> None:
        loss = (self.weight * x).sum()
        torch_compat.ddp_prepare_for_backward(self.wrapper[0], loss)
        loss.backward()
        self.wrapper[0].require_backward_grad_sync = False  # or DDP would arm its reducer again


def backward_inside_ddp() -> float:
    module = BackwardInside()
    ddp = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
    module.wrapper.append(ddp)
    ddp(torch.tensor([2.0 + 4.0 * dist.get_rank()]))
    return float(module.weight.grad)


@relies_on("torch.ddp_prepare_for_backward", "lightning.pytorch.overrides.distributed.prepare_for_backward")
def test_backward_inside_the_forward_of_ddp_is_averaged() -> None:
    assert run_distributed(backward_inside_ddp, 2, fresh=True) == [4.0, 4.0]


def logged_norms(partial: Any) -> list[type]:
    """What ``self.log`` keeps of a sharded scalar while logged values are converted, and what afterwards."""
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

    def logged() -> type:
        meta = _Metadata("training_step", "norm", on_step=True, on_epoch=False)
        meta.sync = _Sync()
        metric = _ResultMetric(meta, is_tensor=True)
        metric.update(partial, batch_size=1)
        return type(metric.value)

    undo = dtensor_compat.logged_values_through(lambda value: value.full_tensor())
    during = logged()
    undo()
    return [during, logged()]


def read_scalars(partial: Any) -> tuple[float, bool]:
    """A sharded scalar, and whether the operator is torch's own again afterwards."""
    operator = torch.ops.aten._local_scalar_dense.default
    undo = dtensor_compat.operators_of_dtensors(lambda op, args, _: op(args[0].full_tensor()), [operator])
    value = float(partial)
    undo()
    return value, operator not in DTensor._op_dispatcher._custom_op_handlers


def parts_on_two_ranks() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    network = gathered(mesh)
    weight = fsdp_compat.params(fsdp_compat.groups(network)[0])[0]
    chunk, full = fsdp_compat.local_chunk(weight), fsdp_compat.unsharded_param(weight)
    shard = dtensor_compat.local_tensor(fsdp_compat.sharded_param(weight))
    partial = distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [Shard(0)]).norm()
    return {
        "same values": torch.equal(chunk, shard),
        "is a view": chunk.data_ptr() == full[dist.get_rank() :].data_ptr(),
        "read": read_scalars(partial),
        "logged": logged_norms(partial),
        "replicated": read_scalars(distribute_tensor(torch.tensor(7.0), mesh, [Replicate()])),
    }


@relies_on("fsdp.local_chunk", "FSDPParam.fsdp_placement, padded_sharded_param_size and mesh_info")
@relies_on("dtensor.logged_values_through", "_ResultMetric.update")
@relies_on("dtensor.operators_of_dtensors", "DTensor._op_dispatcher._custom_op_handlers")
def test_ranks_find_their_parts_and_read_whole_scalars() -> None:
    for result in run_distributed(parts_on_two_ranks, 2, fresh=True):
        assert result.pop("logged") == [Tensor, DTensor]
        assert result == {"same values": True, "is a view": True, "read": (5.0, True), "replicated": (7.0, True)}


def rebound_shards() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    network = gathered(mesh)
    [group, *_] = fsdp_compat.groups(network)
    weight = fsdp_compat.params(group)[0]
    full, shard = fsdp_compat.unsharded_param(weight), fsdp_compat.sharded_param(weight)
    assert full is not None
    full.data = full.data.clone()
    moved = full.untyped_storage().data_ptr() != weight.all_gather_outputs[0].untyped_storage().data_ptr()
    fsdp_compat.relink(weight)
    linked = full.untyped_storage().data_ptr() == weight.all_gather_outputs[0].untyped_storage().data_ptr()
    group.reshard()
    in_place = fsdp_compat.is_in_place(weight, shard)
    [(module, name)] = fsdp_compat.places(weight)
    module.register_parameter("renamed", module._parameters.pop(name))
    lost = not fsdp_compat.is_in_place(weight, shard)
    fsdp_compat.move(weight, [(module, "renamed")])
    followed = fsdp_compat.is_in_place(weight, shard)
    dtensor_compat.rebind_local(shard, torch.full_like(dtensor_compat.local_tensor(shard), 3.0))
    fsdp_compat.follow_data(weight)
    group.unshard()
    group.wait_for_unshard()
    gathered_there = module._parameters["renamed"] is full and name not in module._parameters
    places = {"in place": in_place, "lost": lost, "followed": followed, "gathered there": gathered_there}
    return {"moved": moved, "linked": linked, **places, "gathered": full.unique().tolist()}


@relies_on("fsdp.places", "FSDPParam._module_info")
@relies_on("fsdp.move", "FSDPParam._module_info")
@relies_on("fsdp.relink", "FSDPParam.all_gather_outputs")
@relies_on("fsdp.is_in_place", "FSDPParam._module_info")
@relies_on("fsdp.follow_data", "FSDPParam.reset_sharded_param")
@relies_on("dtensor.rebind_local", "DTensor._local_tensor")
def test_memory_of_shards_and_of_full_parameters_may_be_exchanged() -> None:
    for result in run_distributed(rebound_shards, 2, fresh=True):
        assert result.pop("gathered") == [3.0]
        assert all(result.values()), result


def functions_seen() -> list[str]:
    mesh, seen = init_device_mesh("cpu", (2,)), []

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(func.__name__)
        return func(*args, **kwargs)

    tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    undo = dtensor_compat.functions_of_dtensors(run)
    tensor[0].add_(tensor.sum())
    undo()
    tensor.add_(1)
    return seen


@relies_on("dtensor.functions_of_dtensors", "DTensor.__torch_function__")
def test_functions_of_dtensors_can_be_carried_out_otherwise() -> None:
    assert run_distributed(functions_seen, 2, fresh=True) == [["__getitem__", "sum", "add_"]] * 2


def meshes_and_collectives() -> dict[str, Any]:
    mesh, other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")), init_device_mesh("cpu", (2,))
    pending: Any = distribute_tensor(torch.tensor([3.0, 4.0]), other, [Shard(0)]).sum()
    dtensor_compat.take_over(pending, distribute_tensor(torch.tensor(7.0), other, [Replicate()]))
    seen: list[str] = []

    def run(operator: Any, args: Any, kwargs: Any) -> Any:
        seen.append(operator.name())
        return operator(*tree_map_only(DTensor, dtensor_compat.local_tensor, args), **kwargs)

    undo = dtensor_compat.operators_of_dtensors(run, dtensor_compat.collective_operators())
    dist.broadcast(pending, 0)
    dist.all_gather([torch.empty_like(pending) for _ in range(2)], pending)
    undo()
    with pytest.raises(NotImplementedError, match="sharding strategy"):
        dist.all_reduce(pending)
    return {
        "roots": [dtensor_compat.root_of(mesh["a"]) is mesh, dtensor_compat.root_of(other) is other],
        "taken over": [str(pending.placements), float(pending.full_tensor())],
        "seen": seen,
    }


@relies_on("dtensor.root_of", "DeviceMesh._get_root_mesh")
@relies_on("dtensor.take_over", "DTensor._local_tensor and _spec")
@relies_on("dtensor.collective_operators", "torch._C._dispatch_get_all_op_names and torch.ops.c10d")
def test_meshes_have_roots_and_collectives_of_dtensors_pass_by() -> None:
    for result in run_distributed(meshes_and_collectives, 2, fresh=True):
        assert result == {
            "roots": [True, True],
            "taken over": ["(Replicate(),)", 7.0],
            "seen": ["c10d::broadcast_", "c10d::allgather_"],
        }


@relies_on("torch.has_functions_of_its_own", "torch._C._disabled_torch_function_impl")
def test_subclasses_with_functions_of_their_own_are_known() -> None:
    kinds = (Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor, EarlierParameter)
    assert [torch_compat.has_functions_of_its_own(kind) for kind in kinds] == [False, False, False, False, True]


def refused_assignment() -> str:
    network = gathered(init_device_mesh("cpu", (2,)))
    for group in fsdp_compat.groups(network):
        group.reshard()
        for param in fsdp_compat.params(group):
            fsdp_compat.refuse_assigned(param)
    block: Any = network.block
    values = {name: torch.zeros(parameter.shape) for name, parameter in block.named_parameters()}
    with pytest.raises(RuntimeError) as caught:
        block.load_state_dict(values, assign=True)
    return str(caught.value)


@relies_on("fsdp.refuse_assigned", "FSDPParam.reset_sharded_param being called after load_state_dict")
def test_assigned_parameters_of_sharded_modules_are_refused() -> None:
    for message in run_distributed(refused_assignment, 2, fresh=True):
        assert "assign=True" in message


def notes_and_counts() -> tuple[str, int, int]:
    rank = dist.get_rank()
    before = torch_compat.message_counts()
    store = torch_compat.default_store("notes", 5.0)
    store.set(str(rank), f"rank {rank}")
    dist.barrier()
    after = torch_compat.message_counts()
    [world] = after
    return store.get(str(1 - rank)).decode(), after[world] - before[world], torch_compat.message_counts()[world]


@relies_on("torch.default_store", "torch.distributed.distributed_c10d._get_default_store")
@relies_on("torch.message_counts", "ProcessGroup._get_sequence_number_for_group")
def test_ranks_leave_notes_and_messages_are_counted() -> None:
    first, second = run_distributed(notes_and_counts, 2, fresh=True)
    assert first[:2] == ("rank 1", 1)
    assert second[:2] == ("rank 0", 1)
    assert first[2] == second[2]


def recorded_here() -> dict[str, Any]:
    since = time.time_ns()
    if dist.get_rank() == 0:
        waits = dist.all_reduce(torch.ones(3), async_op=True)
        [(message, frames)] = torch_compat.recorded_messages(since)[0]
        assert message.is_open  # the other comes later
        assert "recorded_here" in {function for _, _, function in frames}
        torch_compat.default_store("recorded", 60.0).set("seen", "")
        waits.wait()
    else:
        torch_compat.default_store("recorded", 60.0).get("seen")
        dist.all_reduce(torch.ones(3))
    then, is_all = torch_compat.recorded_messages(since, places=False)
    while any(message.is_open for message, _ in then):  # the recorder is told a little later than who waits
        then, is_all = torch_compat.recorded_messages(since, places=False)
    [name] = torch_compat.message_counts()
    return {
        "then": [message for message, _ in then],
        "is all": is_all,
        "members": torch_compat.group_members()[name],
        "name": name,
        "port": torch_compat.store_port(),
    }


@relies_on("torch.recorded_messages", "_distributed_c10d._dump_fr_trace")
@relies_on("torch.records_messages", "TORCH_FR_BUFFER_SIZE")
@relies_on("torch.group_members", "distributed_c10d._world.pg_group_ranks")
@relies_on("torch.store_port", "distributed_c10d._get_default_store")
def test_collectives_are_recorded_with_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_compat.records_messages()
    for seen in run_distributed(recorded_here, 2, fresh=True):
        assert seen["then"] == [torch_compat.Message(seen["name"], 1, "all_reduce", 3, False)]
        assert seen["is all"]
        assert seen["members"] == [0, 1]
        assert seen["port"] is None  # a store in a file
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert not torch_compat.records_messages()


@relies_on("torch.backward_in_modes", "torch.autograd.graph._engine_run_backward")
def test_recomputation_in_backward_is_seen_by_modes() -> None:
    seen: list[str] = []

    class Notes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Notes():
        loss = checkpoint(torch.sin, x, use_reentrant=False).sum()
        torch_compat.backward_in_modes(loss)
    assert seen.count("sin") == 2
    assert torch.equal(x.grad, x.detach().cos())


def groups_of_meshes() -> tuple[int, int, bool, bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    torch_compat.hold_groups(mesh, False)
    released = len(mesh._pg_registry)
    group = mesh.get_group()
    torch_compat.hold_groups(mesh, True)
    same = torch_compat.group_named(group.group_name) is group
    dist.destroy_process_group()
    with pytest.raises(RuntimeError):
        torch_compat.group_named(group.group_name)
    return released, len(mesh._pg_registry), same, dist.is_initialized()


@relies_on("torch.hold_groups", "DeviceMesh._pg_registry")
@relies_on("torch.group_named", "torch.distributed.distributed_c10d._resolve_process_group")
def test_meshes_hold_groups_or_only_their_names() -> None:
    assert run_distributed(groups_of_meshes, 2, fresh=True) == [(0, 1, True, False)] * 2


def meshes_of_sums(forget: bool) -> list[bool]:
    """Whether the sum of two tensors of a mesh has that mesh, before and after the process groups were made anew."""
    rank, found = dist.get_rank(), []
    for store in ("first", "second"):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        if forget:
            dtensor_compat.forget_meshes()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        found.append((tensor + tensor).device_mesh is mesh)
    return found


@relies_on("dtensor.forget_meshes", "torch.distributed.tensor.debug._clear_sharding_prop_cache")
def test_operators_forget_meshes_whose_groups_are_gone() -> None:
    assert run_distributed(meshes_of_sums, 2, False, fresh=True) == [[True, False]] * 2  # torch's tables are in the way
    assert run_distributed(meshes_of_sums, 2, True, fresh=True) == [[True, True]] * 2


def threads_of_autograd() -> int:
    torch_compat.start_autograd()
    with torch_compat.fake_tensor_mode():
        torch.ones(2) + 1
    torch.ones(2, requires_grad=True).sum().backward()
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum("autograd" in name for name in names)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads where the system lists them")
@relies_on("torch.start_autograd", "threads of autograd being made once, in the first backward")
def test_fake_tensors_start_no_threads_of_autograd() -> None:
    assert run_isolated(threads_of_autograd, fresh=True) == 0


@relies_on("torch.reentrant_checkpoints", "torch.utils.checkpoint.CheckpointFunction.forward")
def test_reentrant_checkpoints_are_noticed_and_no_others() -> None:
    noted: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    original = vars(CheckpointFunction)["forward"]
    with torch_compat.reentrant_checkpoints(lambda: noted.append(True)):
        checkpoint(torch.sin, x, use_reentrant=False)
        assert not noted
        y = checkpoint(torch.sin, x, use_reentrant=True)
        assert noted == [True]
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    assert vars(CheckpointFunction)["forward"] is original
    checkpoint(torch.sin, x, use_reentrant=True)
    assert noted == [True]


def forks_without_thread_pool() -> int:
    """How many of some forked ranks fail when threads run their first operators at the same moment."""
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=EffiStrategy(), barebones=True)
    values = torch.ones(200_000)
    torch.set_num_threads(2)
    values.add(1)
    return sum(_fork(functools.partial(_operators_in_threads, trainer, values)) != 0 for _ in range(6))


def _fork(run: Callable[[], bool]) -> int:
    pid = os.fork()
    if pid == 0:
        succeeded = False
        try:
            succeeded = run()
        finally:
            os._exit(not succeeded)
    return os.waitpid(pid, 0)[1]


def _operators_in_threads(trainer: pl.Trainer, values: Tensor) -> bool:
    order: list[Any] = []
    set_threads, start_autograd = torch.set_num_threads, torch_compat.start_autograd
    torch.set_num_threads = lambda count: order.append(count) or set_threads(count)
    torch_compat.start_autograd = lambda: order.append("autograd") or start_autograd()
    trainer.strategy.setup_environment()
    trainer.strategy.setup_environment()  # further runs of this process find the pool
    start, done = threading.Barrier(8), []

    def run() -> None:
        start.wait()
        values.add(1)
        done.append(True)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(done) == len(threads) and order == [2, "autograd", "autograd"] and torch.get_num_threads() == 2


@relies_on("torch.rebuild_thread_pool", "at::set_num_threads making the pool that a fork took away")
def test_forked_ranks_have_a_thread_pool_before_there_are_threads() -> None:
    assert run_isolated(forks_without_thread_pool, fresh=True) == 0


@relies_on("torch.layer_being_parametrized", "the name of register_parametrization's argument in its frame")
def test_layer_being_parametrized() -> None:
    layer, seen = nn.Linear(2, 2), []

    class Looking(nn.Identity):
        def right_inverse(self, weight: Tensor) -> Tensor:
            seen.append(torch_compat.layer_being_parametrized(inspect.currentframe()))
            assert "weight" in layer._parameters  # nothing has been taken off yet
            return weight

    parametrize.register_parametrization(layer, "weight", Looking())
    assert seen[0] is layer
    assert torch_compat.layer_being_parametrized(inspect.currentframe()) is None
