"""From a RunConfig to the limits of its decisions: every wait derives from `detect_s`.

The settings are config.py's, what the limits do is elastic/control's.
"""

from elastic.config import RunConfig
from elastic.control.state import Limits

UNLIMITED_S = 24 * 3600.0


def limits_of(config: RunConfig) -> Limits:
    detect_s = config.detect_s
    return Limits(
        min_workers=config.min_workers,
        max_workers=config.max_workers,
        standby=config.standby,
        steps=config.steps,
        max_failures=config.max_failures,
        join_timeout_s=10 * detect_s if detect_s else 600.0,
        end_timeout_s=100 * detect_s if detect_s else UNLIMITED_S,
        confirm_timeout_s=detect_s or 30.0,
        must_save=config.on_storage_error == "fail",
    )


def heartbeat_s(config: RunConfig) -> float:
    return min(0.5, (config.detect_s or 3.0) / 6)
