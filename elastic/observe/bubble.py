"""What share of a step the stages of pipelines have waited for each other, as measured:
`metrics.jsonl`'s `bubble`.

What is to be expected is elastic/protocol/pipeline.py's, and stands in the layout.
"""

from statistics import median

from elastic.store.files import Folder
from elastic.store.journal import LineTail

LAST_BYTES = 1 << 14
"""Of the file's end: some tens of steps."""


def measured_bubble(folder: Folder, generation: int) -> float | None:
    """The median of the newest steps of that generation; None if there are none."""
    lines = LineTail(folder, "metrics.jsonl", last_bytes=LAST_BYTES).poll()
    of_it = [
        line["bubble"]
        for line in lines
        if line.get("generation") == generation and "bubble" in line
    ]
    shares = [share for share in of_it if isinstance(share, float | int)]
    return float(median(shares)) if shares else None
