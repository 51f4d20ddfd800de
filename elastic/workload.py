"""`Workload`: what a user writes to describe a training job.

Only the interface lives here; whoever calls it is in workers/.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

REQUIRED_METHODS = ("build_model", "build_optimizer", "dataset", "loss")


class Workload:
    """A training job: a model, its optimizer, its samples and its loss.

    A plain class: constructor arguments come from `--set key=value` or from you. It is pickled or
    imported by every worker, so keep heavy things out of the constructor. Required: `build_model`,
    `build_optimizer`, `dataset`, `loss`. Optional, used where you define them:

    - `build_scheduler(self, optimizer)`: a torch scheduler; it counts committed steps.
    - `collate(self, samples)`: a list of samples to a batch; default: torch's `default_collate`.
    - `evaluate(self, session)`: called every `eval_every` steps, see `session.evaluate`.
    """

    loader_processes: int = 1
    """Processes that load samples ahead, in each worker; at least 1."""

    def build_model(self) -> "nn.Module":
        """The model, on the CPU; runs under the run's seed, in every worker."""
        raise missing(self, "build_model(self)")

    def build_optimizer(self, params: "list[nn.Parameter]") -> "Optimizer":
        """The optimizer of `params`: the trainable parameters, in `named_parameters()` order.

        Write `(self, params, model)` to get the model too. May be called again later; its state
        is restored by name, so it must have no side effects.
        """
        raise missing(self, "build_optimizer(self, params)")

    def dataset(self) -> Any:
        """The samples: one of

        - a map-style dataset (Hugging Face's are): `len(dataset)` samples, `dataset[i]` gives one;
        - `elastic.data.parquet(...)`: read and transformed by Ray tasks, in an order by seed and
          epoch; a batch is a dict of column name to tensor (texts stay lists);
        - a `ray.data.Dataset`: in Ray Data's own order, the same each epoch; a resume executes
          the epoch again up to its place. Steps that shuffle must not depend on block sizes.

        An IterableDataset is refused: it fixes no order.
        """
        raise missing(self, "dataset(self)")

    def loss(self, model: "nn.Module", batch: Any) -> "Tensor | tuple[Tensor, Tensor | float]":
        """The scalar mean over the micro-batch, or (sum, weight); one kind for all calls."""
        raise missing(self, "loss(self, model, batch)")


def missing(workload: Workload, signature: str) -> NotImplementedError:
    return NotImplementedError(f"{type(workload).__name__} must define {signature}")
