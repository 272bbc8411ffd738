"""Heads too large for one device's optimizer: parameters, gradients and AdamW's state shared out over the processes.

FSDP2 (torch's `fully_shard`) through Lightning's ModelParallelStrategy. A step gathers the parameters, and its
gradients are averaged as under DDP, so losses, metrics and weights are the same.
"""

from __future__ import annotations

from datetime import timedelta

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from eagle3_lab.errors import UserError

STEPS = ("training_step", "validation_step")
"""What Lightning calls of a module: parameters are whole within, and in shards outside."""


class Sharded(ModelParallelStrategy):
    """Lightning's strategy as this lab needs it: all processes share one head, which is kept as one file.

    In YAML ``trainer: {devices: 8, strategy: {class_path: Sharded}}``.

    Args:
        process_group_backend: how processes talk; null: nccl on GPUs, gloo on CPUs.
        timeout: of one exchange.
    """

    def __init__(self, process_group_backend: str | None = None, timeout: timedelta | None = None) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=default_pg_timeout if timeout is None else timeout,
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes  # Lightning's "auto" is one a machine
        super().setup_environment()


def check(strategy: Strategy) -> None:
    """Refuse Lightning's own strategy, which would split single matrices and keep a head as several files. Raises
    UserError."""
    if isinstance(strategy, ModelParallelStrategy) and not isinstance(strategy, Sharded):
        raise UserError(
            f"trainer.strategy: {type(strategy).__name__} splits matrices or writes checkpoints of several files; "
            "class_path: Sharded"
        )


def shard(module: LightningModule, mesh: DeviceMesh | None) -> None:
    """Share a module out over ``mesh``, once; None: leave it whole. One unit, since a head is a layer or few, all of
    which a step reads."""
    if mesh is None or isinstance(module, FSDPModule):
        return
    fully_shard(module, mesh=mesh["data_parallel"])
    for step in STEPS:
        register_fsdp_forward_method(module, step)
