"""The three places in Keras that have to know of distributed optimizers. For all others Keras does what it did.

- Keras asks of a model whether XLA can compile it. With a distributed optimizer it cannot: XLA does not know Horovod's
  operations.
- For ``mixed_float16`` Keras puts a ``LossScaleOptimizer`` around the optimizer, which leaves out an update if a
  gradient is not finite. Workers must not disagree there, so gradients are reduced before it looks at them.
- A plain optimizer that a training step applies beside the distributed one may have to be refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers import trainer

#: Mark of a function that is ours.
MARK = "ft_hook"


def install(find: Callable[[Any], Any], apply_through: Callable[..., None], refuse: Callable[[str], None]) -> None:
    """Put the hooks into Keras. The second time it does nothing.

    Args:
        find: gives the distributed optimizer in an optimizer, or None.
        apply_through: reduces gradients, then applies them by a function.
        refuse: is told before a plain optimizer is applied, and what it is; raises an error if that must not be.
    """
    scaler = keras.optimizers.LossScaleOptimizer
    if not hasattr(trainer.model_supports_jit, MARK):
        trainer.model_supports_jit = _model_supports_jit(trainer.model_supports_jit, find)
    if not hasattr(scaler.apply, MARK):
        scaler.apply = _scaled_apply(scaler.apply, find, apply_through)
    if not hasattr(BaseOptimizer.apply, MARK):
        BaseOptimizer.apply = _plain_apply(BaseOptimizer.apply, find, refuse)


def _model_supports_jit(asked: Callable[[Any], bool], find: Callable[[Any], Any]) -> Callable[[Any], bool]:
    def model_supports_jit(model: Any) -> bool:
        supports = asked(model)
        if supports and find(getattr(model, "optimizer", None)) is not None:
            warnings.warn(
                "the model is compiled with jit_compile=False: XLA cannot compile Horovod's operations, which its "
                "distributed optimizer runs in each step",
                stacklevel=3,
            )
            return False
        return supports

    setattr(model_supports_jit, MARK, True)
    return model_supports_jit


def _scaled_apply(
    plain: Callable[..., None], find: Callable[[Any], Any], apply_through: Callable[..., None]
) -> Callable[..., None]:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        inner = find(self.inner_optimizer)
        if inner is None or inner.ft_reduction.done:
            plain(self, grads, trainable_variables)
        else:
            variables = None if trainable_variables is None else list(trainable_variables)
            apply_through(self, list(grads), variables, lambda *whole: plain(self, *whole))

    setattr(apply, MARK, True)
    return apply


def _plain_apply(plain: Callable[..., None], find: Callable[[Any], Any], refuse: Callable[[str], None]) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        if find(self) is None:
            refuse(f"a plain {type(self).__name__}")
        plain(self, grads, trainable_variables)

    setattr(apply, MARK, True)
    return apply
