"""Checks of arguments that several functions have in common. They start and change nothing."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

from horovod_ft.errors import ConfigurationError


def check_process_set(process_set: Any) -> None:
    """Raises ConfigurationError for any but the global one."""
    if process_set is not None and process_set != hvd.global_process_set:
        raise ConfigurationError(
            "process_set: Horovod 0.28 cannot form process sets anew after a failure; leave the argument out"
        )


def check_reduction(op: Any, predivide: float, process_set: Any) -> None:
    """Raises ConfigurationError if gradients cannot be reduced like that."""
    if op not in (hvd.Average, hvd.Sum):
        raise ConfigurationError("op must be hvd.Average or hvd.Sum")
    check_process_set(process_set)
    if predivide != 1.0 and op != hvd.Average:
        raise ConfigurationError("gradient_predivide_factor has a meaning with op=hvd.Average only")
    if predivide <= 0:
        raise ConfigurationError(f"gradient_predivide_factor is {predivide}; it must be positive")
