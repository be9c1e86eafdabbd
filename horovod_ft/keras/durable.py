"""What a Keras training hands to a durable checkpoint, and takes back: a ``trainee.Durable``.

Variables that are equal on all workers go by their bytes, so that each worker writes a part of them; everything else
goes as plain values. Nothing is written or read here, and no collective is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import horovod
import keras
import numpy as np
import tensorflow as tf

from horovod_ft.checkpoint import partition, tensors
from horovod_ft.checkpoint.partition import Piece
from horovod_ft.checkpoint.tensors import Tensor, TensorSpec
from horovod_ft.committer import Committer, Part
from horovod_ft.errors import MismatchError
from horovod_ft.keras.parts import LOCAL, RANDOM
from horovod_ft.keras.replica import TensorFlowReplica, VariableBlock, bytes_of
from horovod_ft.parts import Own, at_commit

#: TensorFlow's names of dtypes, as the safetensors format spells them.
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "int32": "I32",
    "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64",
}  # fmt: skip
#: Where ``shared`` says what it is of, and how many variables each worker has of its own.
SCHEMA, OWN_VARIABLES = "schema", "own"
#: What ``local`` holds, and the parts that look after it.
OWN = {"random": RANDOM, "variables": LOCAL}


class TensorFlowDurable:
    """A training state as a durable checkpoint sees it.

    Args:
        replica, committer: of the state.
        parts: all light state, by name; see ``TensorFlowState``.
    """

    def __init__(self, replica: TensorFlowReplica, committer: Committer, parts: Mapping[str, Part]) -> None:
        self._replica = replica
        self._committer = committer
        self._parts = parts
        self._memory: dict[Piece, np.ndarray[Any, Any]] = {}
        self._opened: list[VariableBlock] = []

    @property
    def versions(self) -> Mapping[str, str]:
        return {"tensorflow": tf.__version__, "keras": keras.__version__, "horovod": str(horovod.__version__)}

    # --- saving ----------------------------------------------------------------------------------------------------

    def tensors(self) -> list[TensorSpec]:
        """
        Raises:
            UnsupportedStateError: a variable cannot be held by a checkpoint.
        """
        specs = [spec_of(name, variable) for name, variable in self._replica.replicated()]
        tensors.check_names(specs)
        return specs

    def capture(self, pieces: Sequence[Piece]) -> tuple[list[partition.Part], Callable[[], None]]:
        live = dict(self._replica.replicated())
        self._memory = {piece: self._memory.get(piece, np.empty(piece.nbytes, np.uint8)) for piece in pieces}
        parts = []
        for piece, memory in self._memory.items():
            np.copyto(memory, bytes_of(live[piece.tensor])[piece.start : piece.stop])
            parts.append(partition.Part(spec_of(piece.tensor, live[piece.tensor]), piece, memory.data))
        return parts, _nothing

    def shared(self) -> dict[str, Any]:
        committed = self._committer.committed
        exported = iter(self._committer.export() if committed is None else committed)
        by_name = {name: plain(next(exported)) for name, part in self._parts.items() if part.replicated}
        return {SCHEMA: self._schema(), **by_name}

    def local(self) -> Any:
        return {name: plain(at_commit(cast(Own, self._parts[part]), self._committer)) for name, part in OWN.items()}

    # --- restoring -------------------------------------------------------------------------------------------------

    def open(self, shared: dict[str, Any]) -> list[Tensor]:
        """
        Raises:
            MismatchError: it is of a state with other attributes. Nothing was changed.
        """
        self._check(shared)
        named = self._replica.replicated()
        self._opened = [VariableBlock(variable, local=False) for _, variable in named]
        return [
            Tensor(spec_of(name, variable), block.host(read=False).data)
            for (name, variable), block in zip(named, self._opened, strict=True)
        ]

    def restored(self, shared: dict[str, Any], local: Any) -> None:
        for block in self._opened:
            block.write_back()
        self._opened = []
        for name, part in self._parts.items():
            if part.replicated:
                part.adopt(shared[name])
        for name, value in (local or {}).items():
            self._parts[OWN[name]].adopt(value)
        self._committer.committed = self._committer.export()
        self._committer.save()

    def _schema(self) -> dict[str, Any]:
        own = [f"{tuple(variable.shape)} {variable.dtype}" for variable in self._replica.local()]
        parts = [name for name, part in self._parts.items() if part.replicated]
        return {"parts": parts, "optimizers": self._replica.kinds(), OWN_VARIABLES: own}

    def _check(self, shared: Any) -> None:
        if not isinstance(shared, dict) or not isinstance(shared.get(SCHEMA), dict):
            raise MismatchError("the checkpoint was not saved from a TensorFlowState; use another one")
        there, here = shared[SCHEMA], self._schema()
        told = [f"{what}: {there.get(what)} in the checkpoint, {here[what]} here" for what in here
                if there.get(what) != here[what]]  # fmt: skip
        if told:
            lines = "".join(f"\n  {line}" for line in told)
            raise MismatchError(
                f"the checkpoint is of another training than this one:{lines}\n"
                "Give the state what it had when the checkpoint was saved, or use another checkpoint"
            )


def spec_of(name: str, variable: Any) -> TensorSpec:
    """A variable as a checkpoint names it.

    Raises:
        UnsupportedStateError: a checkpoint cannot hold it.
    """
    dtype = tf.as_dtype(variable.dtype).name
    spec = TensorSpec(name, DTYPES.get(dtype, dtype), tuple(int(length) for length in variable.shape))
    spec.check()
    return spec


def plain(value: Any) -> Any:
    """Nested values in which tensors are arrays, and single numbers of numpy are Python's."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    if isinstance(value, tf.Tensor):
        return value.numpy() if value.shape.rank else np.array(value.numpy())
    return value.item() if isinstance(value, np.generic) else value


def _nothing() -> None:
    """What was captured is there already."""
