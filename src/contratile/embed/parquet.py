"""pyarrow, which writes Parquet."""

from importlib import import_module
from typing import Any


def need_parquet(instead: str) -> tuple[Any, Any]:
    """Import pyarrow and pyarrow.parquet.

    Args:
        instead: The name of an output that does not need them.

    Raises:
        ImportError: pyarrow is not installed.
    """
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        remedy = f"pip install pyarrow, or write {instead}"
        raise ImportError(f"pyarrow is needed to write Parquet: {remedy} ({error})") from error
