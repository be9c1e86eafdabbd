"""Plain nested values as JSON, bit for bit: scalars, containers, NumPy arrays, states of random generators.

JSON's own types stand for themselves. Everything else is an object with one key that begins with ``$``, such as
``{"$tuple": [1, 2]}``. Objects that would need pickle are refused with their path, unless it is allowed explicitly:
to read a pickle runs whatever code it holds. Two references to one object become two objects.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from horovod_ft.errors import DamagedCheckpointError, UnsupportedStateError

#: Beyond that, readers of JSON other than Python's may round a number.
_EXACT = 2**53
_DEEPEST = 200
#: Booleans, numbers, bytes and text; no objects, no records, no types of other packages.
_DTYPE = re.compile(r"[<>|=][biufcSU][0-9]{1,9}", re.ASCII)
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$OrderedDict", Counter: "$Counter"}


def dump(value: Any, *, allow_pickle: bool = False, root: str = "state") -> tuple[bytes, tuple[str, ...]]:
    """A value as a JSON document.

    Args:
        allow_pickle: pickle what has no other form.
        root: begins the paths.

    Returns:
        the document, and the paths of what is pickled in it.

    Raises:
        UnsupportedStateError: something in it has no form here; names its path. With ``allow_pickle``: it cannot be
            pickled either.
    """
    encoder = _Encoder(allow_pickle)
    form = encoder.encode(value, root)
    return json.dumps(form, separators=(",", ":"), allow_nan=False).encode("ascii"), tuple(encoder.pickled)


def load(document: bytes, *, allow_pickle: bool = False) -> Any:
    """The value that was dumped.

    Raises:
        UnsupportedStateError: it holds a pickle, which is not allowed.
        DamagedCheckpointError: it is no such document.
    """
    try:
        return _Decoder(allow_pickle).decode(json.loads(document))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, struct.error) as error:
        raise DamagedCheckpointError(f"the values cannot be read: {error!r}") from error


class _Encoder:
    def __init__(self, allow_pickle: bool) -> None:
        self.pickled: list[str] = []
        self._allow_pickle = allow_pickle
        self._inside: list[int] = []

    def encode(self, value: Any, path: str) -> Any:
        """A value's form. Exact types only: a subclass may hold more than what its base shows."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if abs(value) <= _EXACT else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is bytes:
            return {"$bytes": _text(value)}
        if kind is list or kind is tuple:
            with self._entered(value, path):
                forms = [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return forms if kind is list else {"$tuple": forms}
        if kind in _MAPPINGS:
            return self._mapping(value, path)
        if kind is np.ndarray or (isinstance(value, np.generic) and kind.__module__ == "numpy"):
            return self._numpy(value, path)
        return self._pickle(value, path)

    def _mapping(self, value: dict[Any, Any], path: str) -> Any:
        with self._entered(value, path):
            if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(item, _below(path, key)) for key, item in value.items()}
            pairs = [
                [self.encode(key, f"the key {key!r} of {path}"), self.encode(item, _below(path, key))]
                for key, item in value.items()
            ]
        return {_MAPPINGS[type(value)]: pairs}

    def _numpy(self, value: Any, path: str) -> Any:
        dtype = value.dtype.str
        if _DTYPE.fullmatch(dtype) is None or value.dtype.names is not None or value.dtype.itemsize == 0:
            return self._pickle(value, path)
        data = _text(value.tobytes())
        if isinstance(value, np.generic):
            return {"$scalar": [dtype, data]}
        return {"$array": [dtype, list(value.shape), data]}

    def _pickle(self, value: Any, path: str) -> Any:
        told = f"{path}: {_described(value)}"
        if not self._allow_pickle:
            raise UnsupportedStateError(
                f"{told} cannot be saved without pickle. Replace it by plain values or NumPy arrays, or use "
                "allow_pickle=True if you trust whoever can write to the checkpoints"
            )
        try:
            data = pickle.dumps(value)
        except Exception as error:
            raise UnsupportedStateError(f"{told} cannot be saved, not even with pickle: {error!r}") from error
        self.pickled.append(path)
        return {"$pickle": [path, _text(data)]}

    @contextmanager
    def _entered(self, value: Any, path: str) -> Iterator[None]:
        if id(value) in self._inside:
            raise UnsupportedStateError(f"{path} contains itself, which has no form in a checkpoint")
        if len(self._inside) >= _DEEPEST:
            raise UnsupportedStateError(f"{path} is nested more than {_DEEPEST} deep")
        self._inside.append(id(value))
        yield
        self._inside.pop()


class _Decoder:
    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._forms: dict[str, Callable[[Any], Any]] = {
            "$int": lambda text: int(text, 16),
            "$float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
            "$bytes": _bytes,
            "$tuple": lambda forms: tuple(self.decode(form) for form in forms),
            "$scalar": lambda fields: _array(fields[0], (), fields[1])[()],
            "$array": lambda fields: _array(*fields),
            "$pickle": lambda fields: self._unpickle(*fields),
            **{tag: self._mapping(kind) for kind, tag in _MAPPINGS.items()},
        }

    def decode(self, form: Any) -> Any:
        if isinstance(form, list):
            return [self.decode(item) for item in form]
        if not isinstance(form, dict):
            return form
        tag = next(iter(form), "")
        if not tag.startswith("$"):
            return {key: self.decode(item) for key, item in form.items()}
        if len(form) != 1 or tag not in self._forms:
            raise ValueError(f"an object with the keys {sorted(form)[:3]} is no form of a value")
        return self._forms[tag](form[tag])

    def _mapping(self, kind: type) -> Callable[[Any], Any]:
        return lambda pairs: kind({self.decode(key): self.decode(item) for key, item in pairs})

    def _unpickle(self, path: str, data: str) -> Any:
        if not self._allow_pickle:
            raise UnsupportedStateError(
                f"{path} was saved with pickle, and to read it would run whatever code it holds. Use allow_pickle=True "
                "if you trust whoever could write to the checkpoints"
            )
        try:
            return pickle.loads(_bytes(data))
        except Exception as error:
            raise UnsupportedStateError(f"{path} was saved with pickle and cannot be read back: {error!r}") from error


def _array(dtype: str, shape: Any, data: str) -> Any:
    if _DTYPE.fullmatch(dtype) is None:
        raise ValueError(f"{dtype!r} is no dtype of a plain array")
    raw, kind = _bytes(data), np.dtype(dtype)
    if len(raw) != kind.itemsize * math.prod(shape):
        raise ValueError(f"{len(raw)} bytes are no array of {dtype} with shape {shape}")
    return np.ndarray(tuple(shape), kind, buffer=bytearray(raw))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _below(path: str, key: Any) -> str:
    """A member of the state itself is named as an attribute, what is deeper by its key."""
    attribute = type(key) is str and key.isidentifier() and path.isidentifier()
    return f"{path}.{key}" if attribute else f"{path}[{key!r}]"


def _described(value: Any) -> str:
    kind = type(value)
    if isinstance(value, np.ndarray | np.generic):
        return f"a NumPy array of dtype {value.dtype}"
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
