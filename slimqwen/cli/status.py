"""`slimqwen status`: what runs on this host, what waits for what, and what fills the disk."""

import shutil
from collections.abc import Callable

from slimqwen import variant
from slimqwen.cli.console import console, duration
from slimqwen.records.table import Table
from slimqwen.report import status as found
from slimqwen.report.status import Running

_WIDTH = 60


def status() -> None:
    """Show what runs on this host, by whom and what it waits for; what fills the disk, and which command frees it."""
    root = variant.repository_root()
    columns: dict[str, Callable[[Running], object]] = {
        "what": lambda row: row.what if len(row.what) <= _WIDTH else f"{row.what[: _WIDTH - 1]}…",
        "folder": lambda row: "this one" if row.folder == root else row.folder,
        "waits for": lambda row: row.waits_for,
        "owner": lambda row: row.owner,
        "process": lambda row: row.pid,
        "for": lambda row: duration(row.seconds),
        "port": lambda row: row.port,
    }
    running = found.list_running(root)
    note = () if running else ("Nothing of Slimqwen runs.",)
    console.print(Table.from_rows("On this host", running, columns, *note, text_columns=4).as_rich())
    free = f"{shutil.disk_usage(root).free / 1e9:,.1f} GB of the disk are free."
    rows = tuple((name, cure, f"{size / 1e9:.2f}") for name, size, cure in found.list_disk_use(root))
    disk = Table("Disk", ("what", "what frees it", "GB"), rows, (free,), text_columns=2)
    console.print(disk.as_rich())
