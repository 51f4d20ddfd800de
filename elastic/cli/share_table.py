"""Where the time of the last steps went, as `elastic status` shows it: a line per rank."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from elastic.observe.anatomy import PARTS, Row, shares


def share_table(rows: list[Row]) -> Group:
    """rows: of anatomy.jsonl, at least one. Fits into 80 columns."""
    first, last = min(r["step"] - r["steps"] + 1 for r in rows), max(r["step"] for r in rows)
    steps = f"step {last}" if first >= last else f"steps {first} to {last}"
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    has_gpu = any(row["gpu_memory_bytes"] is not None for row in rows)
    for column in ("rank", "s/step", *PARTS, "memory", *(("GPU",) if has_gpu else ())):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        of_step = shares([row])
        sizes = [row["memory_bytes"], row["gpu_memory_bytes"] or 0]
        table.add_row(
            str(row["rank"]),
            f"{row['step_s'] / max(row['steps'], 1):.3f}",
            *(f"{100 * of_step.get(part, 0.0):.0f} %" for part in PARTS),
            *(size_text(size) for size in sizes[: 1 + has_gpu]),
        )
    return Group(Text(f"where the time of {steps} went, and peak memory:"), table)


def size_text(size_bytes: int) -> str:
    """In units of 1024, as 1.5 GiB."""
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 100 or units[0] == "B" else f"{size:.1f} {units[0]}"
