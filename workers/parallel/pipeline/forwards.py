"""The batches of an evaluation on a stage: each pipeline computes some, its last stage has what the
user's function returns.

See `workers.step.forwards.Forwards`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from elastic.protocol.errors import UserError
from elastic.protocol.mesh import microbatch_ids
from workers.parallel.pipeline.absent import NotHere
from workers.parallel.pipeline.neighbours import Neighbours
from workers.parallel.pipeline.stage import StageModel
from workers.step.forwards import Elsewhere


class StageForwards:
    """Of one rank."""

    def __init__(
        self,
        models: Mapping[int, StageModel],
        neighbours: Neighbours,
        *,
        pipeline: int,
        num_pipelines: int,
    ) -> None:
        """models: by stage, those of this rank."""
        self._models, self._neighbours = models, neighbours
        self._pipeline, self._num_pipelines = pipeline, num_pipelines

    def ids(self, num_batches: int) -> range:
        return microbatch_ids(num_batches, self._num_pipelines, self._pipeline)

    def num_echoes(self, num_batches: int) -> int:
        return 0

    def run(self, batch_id: int, forward: Callable[[], Any]) -> Any:
        found: Any = Elsewhere()
        for stage, model in self._models.items():
            found = self._run(stage, model, batch_id, forward)
        return found

    def _run(self, stage: int, model: StageModel, batch_id: int, forward: Callable[[], Any]) -> Any:
        def receive(like: Sequence[Tensor]) -> list[Tensor]:
            return self._neighbours.receive(like, stage - 1, "activation", batch_id).wait()

        def send(tensors: Sequence[Tensor]) -> None:
            self._neighbours.settle()  # no more batches than one are on their way
            self._neighbours.send(tensors, stage + 1, "activation", batch_id)

        model.begin(receive, send)
        try:
            value = forward()
        except NotHere as error:
            raise UserError(
                f"the function of evaluate() {error}; where the model is in stages, it must return "
                "what it computes as tensors",
                "",
            ) from error
        finally:
            model.give_up()
        model.end()
        return value if model.is_last else Elsewhere()

    def end(self) -> None:
        self._neighbours.settle()


class NoForwards:
    """Of a rank that is inactive."""

    def ids(self, num_batches: int) -> range:
        return range(0)

    def num_echoes(self, num_batches: int) -> int:
        return 0

    def run(self, batch_id: int, forward: Callable[[], Any]) -> Any:
        raise AssertionError("this rank has no batch")

    def end(self) -> None:
        pass
