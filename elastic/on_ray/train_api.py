# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Ray Train's public functions in a worker of a script run: its own, over an object of ours.

`ray.train.report` and its like ask one object, which is made to be replaced (Ray's `TrainFnUtils`);
what they come to is workers/script_loop.py's. The driver's side is elastic/ray_train.py.
"""

import inspect
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayError
from ray.train import Checkpoint, CheckpointUploadMode, ReportedCheckpoint, ReportedCheckpointStatus
from ray.train.v2._internal.execution import train_fn_utils
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2.api.context import LocalTrainContext

from elastic.data.place import Places
from elastic.store.files import Folder

if TYPE_CHECKING:
    from elastic.on_ray.feed.datasets import Datasets
    from elastic.on_ray.feed.passes_actor import PassesFeed
    from elastic.on_ray.feed.shard import Shard
    from workers.script_loop import Call
    from workers.scripts.in_place.shards import ShardDealer


REST_OF_REPORT = (
    "delete_local_checkpoint_after_upload",
    "checkpoint_upload_fn",
    "validation",
)
"""What Ray's `report` passes on behind the mode, in its order."""


class Context(LocalTrainContext):
    """`ray.train.get_context()`: constant within a call of the script, except for the rank where
    the call goes on after a loss."""

    def __init__(self, call: "Call") -> None:
        place = call.place
        super().__init__(
            experiment_name=call.loop.name,
            world_size=place.world_size,
            world_rank=place.rank,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            node_rank=place.node_rank,
        )
        self._folder = call.reports.folder
        self._call = call

    def get_world_rank(self) -> int:
        frame = inspect.currentframe()
        asks = frame.f_back if frame else None
        is_script = asks is None or not (asks.f_globals.get("__name__") or "").startswith("ray.")
        if is_script and self._call.course is not None:
            self._call.course.hear_rank_asked()
        return self._call.rank

    def get_world_size(self) -> int:
        """Ray's `prepare_model` makes no DistributedDataParallel for a lone rank. For one that may
        get company it is told of it: what is kept of the model has the same names then."""
        size: int = super().get_world_size()
        frame = inspect.currentframe()
        asks = frame.f_back if frame else None
        if size == 1 and self._call.most_ranks > 1 and asks is not None and prepares_ddp(asks):
            return self._call.most_ranks
        return size

    def get_storage(self) -> StorageContext:
        return StorageContext(
            storage_path=self._folder.parent.path,
            experiment_dir_name=self._folder.name,
            storage_filesystem=self._folder.filesystem,
            read_only=True,
        )


class CallUtils(train_fn_utils.TrainFnUtils):
    """What Ray's functions ask, for one call of the script."""

    def __init__(self, call: "Call", datasets: "Datasets | None") -> None:
        self._call, self._context, self._datasets = call, Context(call), datasets
        if datasets is not None and (newest := call.newest_checkpoint()) is not None:
            call.reports.passes = Places(call.reports.passes_at(newest))
        else:
            call.reports.passes = Places()
        self._number = call.generation  # that of the call's begin, on all ranks
        self._feed: PassesFeed | None = None
        self._shards: dict[str, Shard] = {}

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        *rest: Any,
        **named: Any,
    ) -> None:
        """Asynchronous uploads are synchronous here: what has returned is never lost."""
        others = {**dict(zip(REST_OF_REPORT, rest, strict=False)), **named}
        refuse_report(checkpoint_upload_mode, others)
        if checkpoint is None:
            self._call.report(metrics, None, checkpoint_dir_name)
            return
        with checkpoint.as_directory() as source:
            self._call.report(metrics, Path(source), checkpoint_dir_name)
        should_delete = others.get("delete_local_checkpoint_after_upload")
        if should_delete is None:
            should_delete = checkpoint_upload_mode is CheckpointUploadMode.ASYNC
        if should_delete:
            shutil.rmtree(checkpoint.path, ignore_errors=True)

    def get_checkpoint(self) -> Checkpoint | None:
        name = self._call.newest_checkpoint()
        return None if name is None else self._checkpoint(name)

    def get_all_reported_checkpoints(
        self, consistency_mode: Any = None, timeout_s: float | None = None
    ) -> list[ReportedCheckpoint]:
        self._call.check()
        return [
            ReportedCheckpoint(
                checkpoint=self._checkpoint(entry["checkpoint_dir_name"]),
                metrics=entry["metrics"],
                status=ReportedCheckpointStatus.COMMITTED,
            )
            for entry in self._call.reports.entries()
        ]

    def get_dataset_shard(self, dataset_info: Any) -> "Shard":
        """The same one each time."""
        self._call.check()
        name: str = dataset_info.dataset_name
        if name not in self._shards:
            self._shards[name] = self._shard(name)
        return self._shards[name]

    def get_context(self) -> Context:
        self._call.check()
        return self._context

    def get_preemption_info(self) -> None:
        """A leaving rank is replaced anyway."""
        self._call.check()

    def is_distributed(self) -> bool:
        return True

    def barrier(self) -> None:
        self._call.barrier()

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        return self._call.broadcast(data)

    def _shard(self, name: str) -> "Shard":
        call, datasets = self._call, self._datasets
        if datasets is None or name not in datasets.names:
            raise KeyError(f"Dataset shard for '{name}' not found: datasets= has none of it")
        from elastic.on_ray.feed.passes_actor import PassesFeed
        from elastic.on_ray.feed.shard import Seat, Shard  # Ray Data takes long to load

        if self._feed is None:
            self._feed = PassesFeed(call.run_id, datasets)
        seat = Seat(
            call=self._number,
            rank=call.place.rank,
            ranks=call.place.world_size,
            run=call.loop.name,
            check=call.check,
            course=self._dealer(name, datasets),
        )
        return Shard(name, self._feed, seat, call.reports.passes, is_split=name in datasets.split)

    def _dealer(self, name: str, datasets: "Datasets") -> "ShardDealer | None":
        """None: a loss has the script called again."""
        call = self._call
        if call.course is None or call.loaders is None:
            return None
        from workers.scripts.in_place.shards import ShardDealer

        number = -1 - sorted(datasets.names).index(name)
        dealer = ShardDealer(call.course, number, self._tell_left, call.call_again)
        if name in datasets.split:
            call.loaders.add(dealer)
        return dealer

    def _tell_left(self, readers: tuple[int, ...]) -> None:
        assert self._feed is not None
        with suppress(RayError):  # it is started again, and hears it from who asks it for rows
            self._feed.actor.hear.remote(self._number, readers)

    def _checkpoint(self, name: str) -> Checkpoint:
        folder: Folder = self._call.reports.folder.at(name)
        return Checkpoint(folder.path, folder.filesystem)


def prepares_ddp(frame: FrameType) -> bool:
    """Whether it is Ray's `prepare_model`, asked for DistributedDataParallel."""
    is_rays = (frame.f_globals.get("__name__") or "").startswith("ray.train.")
    named = frame.f_locals.get("parallel_strategy")
    return is_rays and frame.f_code.co_name == "prepare_model" and named == "ddp"


def refuse_report(mode: CheckpointUploadMode, others: dict[str, Any]) -> None:
    """ValueError for what is not supported."""
    if mode is CheckpointUploadMode.NO_UPLOAD:
        raise ValueError(
            "report(): elastic does not support CheckpointUploadMode.NO_UPLOAD; leave "
            "checkpoint_upload_mode out, and the checkpoint is published whole"
        )
    if others.get("checkpoint_upload_fn") is not None:
        raise ValueError(
            "report(): elastic does not support checkpoint_upload_fn; leave it out, and the "
            "checkpoint is copied to the run directory"
        )
    if others.get("validation"):
        raise ValueError(
            "report(): elastic does not support validation=; validate in the training function, "
            "or after fit()"
        )


@contextmanager
def answering(call: "Call", datasets: "Datasets | None" = None) -> Generator[None]:
    """Within, ray.train's functions answer from this call, and its loaders look whether a member
    was lost before each batch."""
    from ray.train.torch import train_loop_utils as loaders
    from ray.train.v2.torch import train_loop_utils

    from workers.scripts.in_place.loader import deliver

    loader: Any = cast(Any, loaders)._WrappedDataLoader
    functions: Any = train_loop_utils
    rays_devices = functions.get_devices_distributed
    begin, next_batch = loader.__iter__, loader.__next__

    def begun(self: Any) -> Any:
        call.check()
        with call.holding_back():
            return begin(self)

    def checked(self: Any) -> Any:
        call.check()
        batch = next_batch(self)
        deliver(self.dataloader_iter)
        return batch

    train_fn_utils.set_train_fn_utils(CallUtils(call, datasets))
    loader.__iter__, loader.__next__ = begun, checked
    functions.get_devices_distributed = lambda: [call.device]
    try:
        yield
    finally:
        loader.__iter__, loader.__next__ = begin, next_batch
        functions.get_devices_distributed = rays_devices
        train_fn_utils.set_train_fn_utils(None)


def ray_version() -> str:
    return ray.__version__
