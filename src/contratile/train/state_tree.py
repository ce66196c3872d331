"""Convert nested state (dicts, lists, tuples, numbers, strings, tensors) to JSON plus named tensors, and back.

    structure, tensors = flatten(optimizer.state_dict(), "optimizer")
    optimizer.load_state_dict(restore(structure, tensors))

JSON values stay as they are. Types that JSON lacks become an object with a single key that starts with $:
{"$tensor": name}, {"$tuple": [...]}, {"$float": "nan"}, {"$dtype": "torch.bfloat16"}, and for keys other than strings
{"$dict": [[key, value], ...]}. A tensor that occurs several times, such as a tied weight, is stored once.
"""

import math
from typing import Any

import torch
from torch import Tensor

from contratile.errors import bad_type

Json = Any
Key = tuple[Any, ...]

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def flatten(tree: Any, name: str) -> tuple[Json, dict[str, Tensor]]:
    """Split a tree into a JSON structure and tensors by path.

    Args:
        tree: The nested state.
        name: What error messages call it.

    Returns:
        The structure, and the tensors: contiguous, on the CPU, sharing no memory.
    """
    walk = _Walk(name)
    return walk.encode(tree, ()), walk.tensors


def restore(structure: Json, tensors: dict[str, Tensor]) -> Any:
    """Undo `flatten`. Tied tensors are one tensor again."""
    if isinstance(structure, list):
        return [restore(part, tensors) for part in structure]
    if not isinstance(structure, dict):
        return structure
    match next(iter(structure.items()), None):
        case ("$tensor", name):
            return tensors[name]
        case ("$tuple", parts):
            return tuple(restore(part, tensors) for part in parts)
        case ("$dict", items):
            return {restore(key, tensors): restore(value, tensors) for key, value in items}
        case ("$float", text):
            return float(text)
        case ("$dtype", text):
            return _DTYPES[text]
    return {key: restore(value, tensors) for key, value in structure.items()}


class _Walk:
    """One traversal of a tree; collects its tensors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self._met: dict[Key, str] = {}
        self._storages: set[int] = set()

    def encode(self, value: Any, path: tuple[str, ...]) -> Json:
        if isinstance(value, Tensor):
            return {"$tensor": self._add(value, path)}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value)}
        if isinstance(value, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: self.encode(item, (*path, key)) for key, item in value.items()}
            here = [(key, self.encode(item, (*path, str(key)))) for key, item in value.items()]
            return {"$dict": [[self.encode(key, path), item] for key, item in here]}
        if isinstance(value, list | tuple):
            parts = [self.encode(part, (*path, str(index))) for index, part in enumerate(value)]
            return parts if isinstance(value, list) else {"$tuple": parts}
        place = ".".join((self.name, *path))
        expected, remedy = "numbers, texts, tensors and nestings of them", "Convert it, for example with .tolist()."
        bad_type(place, expected=expected, got=type(value).__name__, remedy=remedy)

    def _add(self, x: Tensor, path: tuple[str, ...]) -> str:
        """The name under which a tensor is stored."""
        name = ".".join(path) or "value"
        if x.layout != torch.strided or x.is_meta or hasattr(x, "full_tensor"):
            got = "a sharded tensor" if hasattr(x, "full_tensor") else f"layout {x.layout} on {x.device}"
            remedy = "Gather it first, for example with x.full_tensor()."
            bad_type(f"{self.name}.{name}", expected="a plain tensor", got=got, remedy=remedy)
        x = x.detach()
        storage = x.untyped_storage().data_ptr()
        # Addresses may coincide between devices.
        key = (x.device, storage, x.storage_offset(), x.shape, x.stride(), x.dtype)
        if x.numel() and key in self._met:
            return self._met[key]
        while name in self.tensors or name == "__metadata__":  # reserved by safetensors
            name += "'"
        # safetensors refuses shared memory: another view of a stored tensor is copied.
        plain = x.cpu().resolve_conj().resolve_neg().contiguous()
        shared = plain.data_ptr() == x.data_ptr() and storage in self._storages
        self.tensors[name] = plain.clone() if shared else plain
        self._storages.add(storage)
        self._met[key] = name
        return name
