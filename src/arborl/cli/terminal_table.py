"""Tables of the commands; imported by a command when it prints."""

from collections.abc import Collection
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

__all__ = ["Text", "new_table"]


def new_table(*columns: str, left: Collection[str] = (), fold: Collection[str] = (), **column: Any) -> Table:
    """A table without rows. Columns are right-aligned except those of `left` and `fold`; `fold` breaks long words."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in columns:
        is_left = name in left or name in fold
        overflow: Any = "fold" if name in fold else "ellipsis"
        table.add_column(name, justify="left" if is_left else "right", overflow=overflow, **column)
    return table
