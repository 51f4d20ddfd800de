"""What the run directory keeps of a `ray.data.Dataset`: its length and columns, in `data.json`.

There is no plan of it. The record of Parquet files is record.py's.
"""

from dataclasses import asdict, dataclass

from elastic.data.record import NAME
from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, read_json, write_json

KEY = "ray_dataset"


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """What must be the same whenever the dataset is executed."""

    num_rows: int
    columns: str
    """Names and types."""

    def differences(self, past: "DatasetFacts") -> str:
        """In words; empty if there is none."""
        now, before = asdict(self), asdict(past)
        found = [f"{k} was {before[k]!r} and now is {now[k]!r}" for k in now if before[k] != now[k]]
        return "; ".join(found)


def compare_facts(folder: Folder, facts: DatasetFacts) -> bool:
    """Whether they are on record; WrongInput if the run began with others."""
    found = read_json(folder, NAME)
    if found is None:
        return False
    if KEY not in found:
        raise WrongInput("the run began with other data, and dataset() now is a ray.data.Dataset")
    changes = facts.differences(DatasetFacts(**found[KEY]))
    if changes:
        raise WrongInput(
            f"the ray.data.Dataset changed since the run began: {changes}. Bring it back as it "
            "was, or use another --name"
        )
    return True


def write_facts(folder: Folder, facts: DatasetFacts) -> bool:
    """Whether they are on record now: they are once there is a run directory."""
    if not folder.exists("config.json"):
        return False
    if read_json(folder, NAME) is None:
        write_json(folder, NAME, {KEY: asdict(facts)})
    return True
