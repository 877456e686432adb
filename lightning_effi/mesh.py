"""Who takes part in a run, and how they talk: ranks, mesh, process groups and Lightning's collectives."""

from __future__ import annotations

import gc
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_effi.comm.board import Board
from lightning_effi.comm.differentiable import gather_with_gradients
from lightning_effi.comm.logged import reduce_logged
from lightning_effi.comm.ranks import Ranks, RankWords
from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.compat import torch as torch_compat
from lightning_effi.config import EffiConfig
from lightning_effi.context import Group, Groups, RunContext
from lightning_effi.layout import AXES, Layout
from lightning_effi.loop.hooks import UserHooks
from lightning_effi.loop.watch import Watch
from lightning_effi.modules.undo import Undo
from lightning_effi.sharded_tensors.wholes import whole

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import LayerSync
    from torch.distributed.device_mesh import DeviceMesh

    from lightning_effi.precision import EffiPrecision

T = TypeVar("T")

# Meshes with their groups, by default process group: runs of one layout in one process share them.
_made: weakref.WeakKeyDictionary[Any, dict[Any, tuple[DeviceMesh, Groups]]] = weakref.WeakKeyDictionary()

_processes: set[int] = set()  # that have had process groups: this one, and one that it was forked from


def _end_alone() -> None:
    """End the groups of a run in one process: a later one may want several, and fork them from here."""
    dist.destroy_process_group()
    _collect_here()


def _collect_here() -> None:
    """Let destroyed groups go. Not in a process that inherited them: their threads are not there to be joined."""
    if os.getpid() in _processes:
        gc.collect()


class MeshStrategy(ParallelStrategy, ABC):
    """A parallel strategy whose processes are laid out on the axes of a :class:`~lightning_effi.Layout`."""

    config: EffiConfig

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_nodes = 1
        self._layout: Layout | None = None
        self._device_mesh: DeviceMesh | None = None
        self.undo = Undo()  # of what a run changes around it
        self.board: Board | None = None  # notes of the ranks of this run
        self.watch: Watch | None = None  # for ranks of this run that wait for each other
        self._groups = Groups()
        self._context: RunContext | None = None
        self.words = RankWords()
        self._user_hooks = UserHooks(self.words)

    # -- who is who --------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The size of each axis; known from the Trainer's construction on."""
        if self._layout is None:
            raise RuntimeError("strategy.layout is known once the Trainer has been constructed with this strategy")
        return self._layout

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's mesh with the axes ``pp``, ``replicate``, ``shard`` and ``tp``; known once processes have started."""
        if self._device_mesh is None:
            raise RuntimeError("strategy.device_mesh is known once the processes have started (from setup() on)")
        return self._device_mesh

    @property
    def context(self) -> RunContext:
        """What every part of the run may know; there once the processes have started."""
        if self._context is None:
            raise RuntimeError("strategy.context is known once the processes have started (from setup() on)")
        return self._context

    @property
    @abstractmethod
    def precision(self) -> EffiPrecision:
        """The precision plugin, as what it is here."""

    @property
    @abstractmethod
    def modules_here(self) -> Sequence[str] | None:
        """Names of the modules that run on this rank, with all below them; ``None`` where that is not known yet."""

    @property
    def layer_sync(self) -> LayerSync | None:
        """What ``Trainer(sync_batchnorm=True)`` asks for."""
        return self._layer_sync

    @property
    def data_parallel_rank(self) -> int:
        """Which of the :attr:`data_parallel_size` different batches this process works on."""
        process = self.words.process
        return self.layout.data_parallel_rank(self.global_rank if process is None else process.rank)

    @property
    @override
    def world_size(self) -> int:
        """All processes; in hooks of the module the data-parallel ranks, see :mod:`lightning_effi.comm.ranks`."""
        return super().world_size if self.words.process is None else self.words.size

    @property
    @override
    def global_rank(self) -> int:
        """Of this process; in hooks of the module that share out data, its data-parallel rank."""
        return super().global_rank if self.words.process is None else self.words.rank

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this is the first process of all, also where :attr:`global_rank` is a data-parallel rank."""
        process = self.words.process
        return (super().global_rank if process is None else process.rank) == 0

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """Of this node's processes; ``trainer.num_devices`` counts them, in hooks as :attr:`world_size` does."""
        devices = self._parallel_devices
        return None if devices is None else devices[: self.words.devices(len(devices), self.num_nodes)]

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        self._parallel_devices = parallel_devices

    @property
    def data_parallel_size(self) -> int:
        """How many different batches are worked on at once."""
        return self.layout.data_parallel_size

    @property
    def is_distributed(self) -> bool:
        """Asked by Lightning before it injects distributed samplers and before it reduces logged values.

        Ranks that all work on the same batch need neither: the loader keeps its own order.
        """
        return self.has_several_processes and (self._layout is None or self.data_parallel_size > 1)

    @property
    def has_several_processes(self) -> bool:
        return self.num_processes * self.num_nodes > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self._parallel_devices is not None
        return self._parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self._parallel_devices or ())

    @property
    def process_group_backend(self) -> str | None:
        """The backend asked for; ``None`` lets the device decide."""
        return self.config.process_group_backend

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    def needs_process_group(self) -> bool:
        """One process needs none, unless it computes with other parameters than it stores."""
        return self.has_several_processes or self.precision.compute.everywhere

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the ranks that average gradients."""
        return self._groups.data.device

    # -- starting ----------------------------------------------------------------------------------------------------

    def resolve_layout(self) -> None:
        """Fit the configured sizes into the number of processes, which the Trainer knows by now."""
        self._layout = Layout.resolve(
            self.num_processes * self.num_nodes,
            zero_stage=self.config.zero_stage,
            data_parallel_size=self.config.data_parallel_size,
            replicate_size=self.config.replicate_size,
            tensor_parallel_size=self.config.tensor_parallel_size,
            pipeline_parallel_size=self.config.pipeline_parallel_size,
        )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        torch_compat.rebuild_thread_pool()  # before there are other threads, of autograd and of process groups
        torch_compat.start_autograd()
        if self.is_distributed or not lightning_compat.is_seeded():
            # otherwise the loader goes on from where the module's initialisation left, as in a single process
            lightning_compat.reset_seed()
        self.set_world_ranks()
        if self.needs_process_group:
            self._start_process_groups()
        self._context = RunContext(
            config=self.config,
            layout=self.layout,
            rank=self.global_rank,
            processes_per_node=self.num_processes,
            device=self.root_device,
            precision=self.precision,
            mesh=self._device_mesh if self.needs_process_group else None,
            groups=self._groups,
            words=self.words,
        )

    def _start_process_groups(self) -> None:
        assert self.cluster_environment is not None
        if not dist.is_initialized():
            _collect_here()  # what an earlier run left in cycles may hold destroyed groups, and their store
            if not self.has_several_processes:
                self.undo.push(_end_alone, "the process group of one process")
        _processes.add(os.getpid())
        lightning_compat.init_process_group(
            self.cluster_environment,
            self.config.process_group_backend or lightning_compat.default_backend(self.root_device),
            self.config.timeout,
            device_id=None if self.root_device.type == "cpu" else self.root_device,
        )
        self.board = Board.of_next_run() if self.has_several_processes else None
        made = _made.setdefault(dist.group.WORLD, {})
        key = (self.layout, self.root_device.type, self.config.timeout)
        if key not in made:
            made[key] = self._make_groups()
            dtensor_compat.forget_meshes()
        self._device_mesh, self._groups = made[key]
        torch_compat.hold_groups(self._device_mesh, True)
        self.undo.push(self._let_groups_go, "process groups held by the mesh")
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh
        self._tell_ranks_apart(self.lightning_module)
        if self.board is not None:
            self._watch_ranks(self.board)

    def _watch_ranks(self, board: Board) -> None:
        if not torch_compat.records_messages():
            rank_zero_warn(
                "lightning_effi: ranks that wait for each other will not be found, since TORCH_FR_BUFFER_SIZE=0 keeps"
                " torch from recording messages",
                category=UserWarning,
            )
            return
        self.watch = Watch(board, dist.get_rank())
        self.undo.push(self.watch.stop, "a thread that watches for ranks that wait for each other")

    def _tell_ranks_apart(self, module: pl.LightningModule) -> None:
        process = Ranks(self.layout.world_size, dist.get_rank(), self._groups.run.device.group_name)
        group = self._groups.user.device.group_name
        data = Ranks(self.data_parallel_size, self.layout.data_parallel_rank(process.rank), group)
        self.words.start(process, data)
        trainer: Any = module.trainer
        self._user_hooks.install(module, trainer.datamodule, trainer.callbacks)
        change = "hooks of module, data and callbacks tell which ranks trainer.world_size and the default group mean"
        self.undo.push(self._user_hooks.remove, change)

    def leave_hooks(self) -> None:
        """At the end of a run, whatever became of it: hooks are the user's own again."""
        self._user_hooks.remove()

    def _make_groups(self) -> tuple[DeviceMesh, Groups]:
        """On the CPU the user's code has groups of its own: the default group, or one of the data-parallel ranks.

        Two messages of different size that meet in gloo end the process without a word, and two of one size swap their
        values. In different groups they are two waits, of which :mod:`lightning_effi.loop.watch` knows. On CUDA nobody
        watches, and further communicators take memory of the device.
        """
        apart = self.config.timeout if self.root_device.type == "cpu" and self.has_several_processes else None
        mesh = self.layout.device_mesh(self.root_device.type, apart)
        axes = [name for name in ("replicate", "shard") if mesh[name].size() > 1] or ["shard"]
        several = len(axes) > 1
        flat = (
            torch_compat.flatten_mesh(mesh["replicate", "shard"], "data_parallel", apart) if several else mesh[axes[0]]
        )
        data = self._with_control(flat.get_group(), ("replicate", "shard"))
        groups = Groups(
            data=data,
            user=data if apart is None else self._user_group(data),
            tensor=self._with_control(mesh["tp"].get_group(), ("tp",)),
            pipeline=self._with_control(mesh["pp"].get_group(), ("pp",)),
            run=self._with_control(dist.group.WORLD, AXES, apart=True),
        )
        return mesh, groups

    def _let_groups_go(self) -> None:
        """The run is over: whoever destroys the process groups now ends them."""
        self.board = self.watch = None
        assert self._device_mesh is not None
        torch_compat.hold_groups(self._device_mesh, False)
        if self.layout.tensor * self.layout.pipeline > 1:
            _collect_here()  # layers and stages refer to each other in cycles, and to groups

    def _with_control(self, group: Any, axes: tuple[str, ...], *, apart: bool = False) -> Group:
        """The ranks along ``axes`` again, with a backend for CPU tensors; every rank must make every group.

        Args:
            group: their process group.
            axes: of the mesh.
            apart: also where ``group`` has such a backend. A rank that stays behind in some collective then misses in
                the next message of the control group, while messages of one group would be taken for each other.
        """
        if self.root_device.type == "cpu" and not (apart and self.has_several_processes):
            return Group.of(group, group)
        return Group.of(group, self._gloo_group(axes))

    def _user_group(self, data: Group) -> Group:
        """The data-parallel ranks again, by another group than that of sharding."""
        if self.data_parallel_size == 1:
            return data
        is_all = self.data_parallel_size == self.layout.world_size
        group = dist.group.WORLD if is_all else self._gloo_group(("replicate", "shard"))
        return Group.of(group, group)

    def _gloo_group(self, axes: tuple[str, ...]) -> Any:
        """A new group of the ranks along ``axes``; every rank must make every group."""
        layout, mine = self.layout, None
        by_place: dict[Any, list[int]] = {}
        for rank in range(layout.world_size):
            by_place.setdefault(layout.coordinates(rank)._replace(**dict.fromkeys(axes, 0)), []).append(rank)
        for ranks in by_place.values():
            control = dist.new_group(ranks, backend="gloo", timeout=self.config.timeout)
            mine = control if self.global_rank in ranks else mine
        return mine

    def set_world_ranks(self) -> None:
        """Called by Lightning when the Trainer is constructed, and again in each process."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        lightning_compat.set_rank_zero(self.global_rank)

    # -- collectives -------------------------------------------------------------------------------------------------

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_available() and dist.is_initialized():
            on_cuda = self.root_device.type == "cuda"
            device_ids = [self.root_device.index] if on_cuda else None
            dist.barrier(None if self.words.process is None else self.words.group, device_ids=device_ids)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not (dist.is_available() and dist.is_initialized()):
            return obj
        objects = [whole(obj)]  # a parameter between steps is a shard, and another rank's is no use
        group = None if self.words.process is None else self.words.group
        dist.broadcast_object_list(objects, group=group, group_src=src)
        return objects[0]

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Over the data-parallel ranks: ranks that work on the same batch have the same value, and count once."""
        if not isinstance(tensor, Tensor) or not self.is_distributed:
            return tensor
        return reduce_logged(tensor, group or self._groups.user.device, reduce_op, self.lightning_module)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        tensor = whole(tensor)  # a parameter between steps is a shard; stock gathers whole copies
        if group is None or group is dist.group.WORLD:  # self.all_gather() passes that where no group was asked for
            group = self._groups.user.device
            self.words.note_count("self.all_gather")
            if self.needs_process_group and self.data_parallel_size == 1:
                return tensor  # as in one process
        if sync_grads and group is not None:
            return gather_with_gradients(tensor, group)
        return lightning_compat.all_gather_batch(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all ranks, whatever their batch."""
        votes = torch.tensor(int(decision), device=self.root_device)
        voters = 1
        if dist.is_available() and dist.is_initialized():
            group = None if self.words.process is None else self.words.group
            dist.all_reduce(votes, group=group)
            voters = dist.get_world_size(group)
        return bool(votes == voters) if all else bool(votes)
