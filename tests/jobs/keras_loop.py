"""Many a training loop of one's own in one job, in each of which workers die.

``python -m tests.jobs.keras_loop FOLDER JOB`` is one worker. Each worker that is left leaves what it ended with, for
each case. One of them also trains alone on whole batches, and leaves how far that is apart.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_ft.keras as hvd
from horovod_ft.data import EpochOrder
from horovod_ft.faults.plan import Fault
from horovod_ft.keras.runtime import current
from horovod_ft.ledger import Ledger
from tests.jobs.keras_fit import SEED, START_RANK, STUCK_S, Array, adam, dense, hold, kill, momentum

#: Samples, and those of a global batch: slices are equal for up to six workers, since a tape does not weight them.
EVEN = (480, 60)
#: With slices of different size, and a last batch that is not full.
UNEVEN = (100, 12)


@dataclass(frozen=True)
class Case:
    """A training, and what goes wrong in it.

    Attributes:
        faults: entries of a fault plan.
        body: worker and step in which it dies, between its forward and its backward pass.
        reduction: worker and step in which it dies, when two of its gradients are reduced.
        tape: reduce by a tape, else by the optimizer.
        compiled: gradients and update are one ``tf.function``.
        passes: batches for an update.
        sizes: samples, and those of a global batch.
        hold: step before which workers wait for another one to be announced.
    """

    faults: tuple[Fault, ...] = ()
    body: tuple[int, int] | None = None
    reduction: tuple[int, int] | None = None
    optimizer: Callable[[], Any] = momentum
    tape: bool = False
    compiled: bool = False
    passes: int = 1
    sizes: tuple[int, int] = EVEN
    epochs: int = 2
    hold: int | None = None

    def arrays(self) -> tuple[Array, Array]:
        x = np.random.default_rng(7).normal(size=(self.sizes[0], 6)).astype(np.float32)
        return x, x[:, :1] * x[:, 1:2]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesInReduction:
    """Compression that changes nothing. One worker reduces gradients one after the other, and dies after two.

    All workers of a case have one: a reducer of one's own compares names when the others do not.

    Args:
        worker: who dies.
        due: it is the step for it.
    """

    def __init__(self, worker: int, due: Callable[[], bool]) -> None:
        self._mine = worker == START_RANK
        self._due = due
        self._graph: Any = None
        self._reduced: list[Any] = []

    def compress(self, gradient: Any) -> tuple[Any, None]:
        if not self._mine:
            return gradient, None
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._graph:
            self._graph, self._reduced = graph, []
        through = len(self._reduced)

        def strike() -> int:
            if through == 2 and self._due():
                die()
            return 0

        with tf.control_dependencies(self._reduced):
            struck = tf.py_function(strike, [], tf.int32)
        with tf.control_dependencies([struck]):
            return tf.identity(gradient), None

    def decompress(self, reduced: Any, context: None) -> Any:
        self._reduced.append(reduced)
        return reduced


def squares(model: Any, x: Any, y: Any) -> Any:
    return tf.square(model(x, training=True) - y)


class Loop:
    """One worker's training."""

    def __init__(self, name: str, case: Case, folder: Path) -> None:
        runtime = current()
        runtime.ledger = Ledger(folder / f"ledger-{name}", runtime.bus.worker)
        runtime.injector.waiting = [fault for fault in case.faults if fault.worker == START_RANK]
        self.case, self.folder = case, folder
        keras.utils.set_random_seed(3)
        self.model = dense()
        self.wire: Any = hvd.Compression.none
        if case.reduction is not None:
            self.wire = DiesInReduction(case.reduction[0], lambda: self.at(case.reduction))
        self.optimizer = case.optimizer()
        if not case.tape:
            hvd.DistributedOptimizer(self.optimizer, compression=self.wire, backward_passes_per_step=case.passes)
        self.optimizer.build(self.model.trainable_variables)
        self.dataset = hvd.elastic.ElasticDataset(
            *case.arrays(), global_batch_size=case.sizes[1], shuffle=True, seed=SEED
        )
        self.state = hvd.elastic.TensorFlowState(
            model=self.model, optimizer=self.optimizer, dataset=self.dataset, history=[], batches=[]
        )
        self.entered = 0
        self.first: int | None = None
        self.update = tf.function(self.updated, autograph=False) if case.compiled else self.updated

    def at(self, moment: tuple[int, int] | None) -> bool:
        return moment == (START_RANK, self.state.steps + 1)

    def run(self) -> None:
        hvd.elastic.run(self.train)(self.state)

    def train(self, state: Any) -> None:
        self.entered += 1
        for epoch in range(self.dataset.cursor.epoch, self.case.epochs):
            if self.dataset.cursor.epoch != epoch:
                self.dataset.begin_epoch(epoch)
            for x, y in self.batches():
                self.hold()
                with state.step():
                    self.step(x, y, epoch)

    def batches(self) -> Iterator[Any]:
        while True:
            try:
                batch = self.dataset.next_batch()
            except StopIteration:
                return
            yield tuple(tf.constant(part) for part in batch)

    def step(self, x: Any, y: Any, epoch: int) -> None:
        state = self.state
        if self.first is None:
            self.first = state.steps + 1
        total = tf.stack([tf.reduce_sum(squares(self.model, x, y)), tf.cast(len(x), tf.float32)])
        squared, rows = hvd.allreduce(total, op=hvd.Sum, name="loss").numpy().tolist()
        state.history = [*state.history, squared / rows]
        state.batches = [*state.batches, epoch]
        self.update(x, y)

    def updated(self, x: Any, y: Any) -> None:
        tape: Any = tf.GradientTape()
        if self.case.tape:
            tape = hvd.DistributedGradientTape(tape, compression=self.wire)
        with tape:
            loss = tf.reduce_mean(squares(self.model, x, y))
        if self.at(self.case.body):
            die()
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def hold(self) -> None:
        if self.case.hold == self.state.steps + 1 and START_RANK <= 1:
            hold(self.folder)


def digest(loop: Loop) -> list[str]:
    return [value.numpy().tobytes().hex() for value in (*loop.model.trainable_variables, *loop.optimizer.variables)]


def apart(loop: Loop) -> dict[str, float]:
    """From the same training by one process, without Horovod and without failures."""
    case = loop.case
    keras.utils.set_random_seed(3)
    length, batch = case.sizes
    model, optimizer, order = dense(), case.optimizer(), EpochOrder(length, shuffle=True, seed=SEED)
    variables = model.trainable_variables
    optimizer.build(variables)
    (x, y), history = case.arrays(), []
    sums: list[Any] = []
    for epoch in range(case.epochs):
        for start in range(0, length, batch):
            rows = order(epoch)[start : start + batch]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(squares(model, x[rows], y[rows]))
            history.append(float(loss))
            sums.append(tape.gradient(loss, variables))
            if len(sums) == case.passes:
                optimizer.apply([tf.add_n(parts) for parts in zip(*sums, strict=True)], variables)
                sums = []

    def most(left: Any, right: Any) -> float:
        return max(float(np.abs(one.numpy() - two.numpy()).max()) for one, two in zip(left, right, strict=True))

    assert len(history) == len(loop.state.history)
    return {
        "weights": most(loop.model.trainable_variables, variables),
        "optimizer": most(loop.optimizer.variables, optimizer.variables),
        "history": float(np.abs(np.array(loop.state.history) - np.array(history)).max()),
    }


#: By job: the cases that its workers go through, one after the other. Each job begins with workers of its own.
JOBS: dict[str, dict[str, Case]] = {
    "gradients": {
        "body": Case(body=(4, 5), tape=True, optimizer=adam),
        "reduction": Case(reduction=(0, 5), tape=True),
        "compiled": Case(reduction=(2, 5), compiled=True, optimizer=adam),
    },
    "updates": {
        "weighted": Case(reduction=(1, 5), optimizer=adam, sizes=UNEVEN),
        "commit": Case((kill(4, 5, "commit"),), sizes=UNEVEN),
        "passes": Case(body=(0, 3), passes=2),
    },
    "tape": {"tape_uneven": Case(body=(0, 5), tape=True, sizes=UNEVEN)},
    "newcomer": {"newcomer": Case(hold=5, epochs=3, sizes=UNEVEN)},
}


def main() -> None:
    faulthandler.dump_traceback_later(STUCK_S)
    folder = Path(sys.argv[1])
    hvd.init()
    for name, case in JOBS[sys.argv[2]].items():
        loop = Loop(name, case, folder)
        loop.run()
        group, state = current().group(), loop.state
        waiting = [str(fault) for fault in current().injector.waiting]
        left = {"values": digest(loop), "size": group.size, "waiting": waiting, "steps": state.steps}
        left |= {"history": state.history, "batches": state.batches, "entered": loop.entered, "first": loop.first}
        if group.rank == group.size - 1:
            left["apart"] = apart(loop)
        (folder / f"{name}-{START_RANK}-{os.getpid()}.json").write_text(json.dumps(left))
    hvd.shutdown()


if __name__ == "__main__":
    main()
