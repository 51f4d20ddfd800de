"""`SpotSource`: where a machine learns that its cloud will take it away.

Who asks there is workers/health/spot.py.
"""

import re
from dataclasses import dataclass

AUTO = "auto"
CLOUDS = ("aws", "gcp", "azure", AUTO)
HOST = "http://169.254.169.254"
"""The metadata server of all three, which only the machine itself reaches."""


@dataclass(frozen=True, slots=True)
class SpotSource:
    """A cloud, or "auto": whichever answers; and its metadata server, "" for the usual one."""

    cloud: str
    url: str = ""


def parse_spot(text: str) -> SpotSource:
    """`aws`, or `aws@http://host:port`. ValueError for anything else."""
    cloud, at, url = text.partition("@")
    if cloud not in CLOUDS or (at and not re.match(r"https?://[^/\s]+$", url)):
        raise ValueError(
            f"spot={text!r} is unknown: choose one of {', '.join(CLOUDS)}, or "
            "CLOUD@http://HOST:PORT for a metadata server elsewhere"
        )
    return SpotSource(cloud, url)
