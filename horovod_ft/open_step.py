"""The step that is open on this worker: begun, updated, then made final or given up; and the books about it.

Everything here is local and quick: no collective, no policy, and nothing is caught. Who calls it and when is decided in
``step.py`` for the good case, and in ``reconcile.py`` after a failure.
"""

from __future__ import annotations

from horovod_ft.agreement import Agreement, Reach
from horovod_ft.committer import Committer
from horovod_ft.events import EventBus
from horovod_ft.history import History
from horovod_ft.ledger import Ledger
from horovod_ft.losses import Losses
from horovod_ft.membership.base import Group
from horovod_ft.policy import Forward
from horovod_ft.trainee import Finished, Trainee


class OpenStep:
    """One at a time; there is always the next one.

    Attributes:
        trainee, committer: what it changes.
        stepping: training goes by ``step``; False while it goes by explicit commits, or has not begun.
        shared_by: the last group in which this worker had the state of all, and as which of them: its batch was dealt
            there.
        back_from: it is given up together with steps before it, for a copy of an earlier state: the newest of these
            steps. None otherwise.
        begins_at: at the start of a training that others may have begun before: the step that it goes on from.
        given_up: its gradients are gone; until all have the state that the group goes on from.
        noted: how the group broke in this step; kept, in case the user's code catches the exception.
    """

    def __init__(
        self, trainee: Trainee, committer: Committer, ledger: Ledger, bus: EventBus, history: History
    ) -> None:
        self.trainee = trainee
        self.committer = committer
        self.stepping = False
        self.shared_by = Group(0, 1, -1)
        self.back_from: int | None = None
        self.begins_at: int | None = None
        self.given_up = False
        self.noted: BaseException | None = None
        self._ledger = ledger
        self._bus = bus
        self._history = history
        self._losses = Losses(ledger, trainee)

    @property
    def number(self) -> int:
        """That it will have once committed; the first is 1."""
        return self.committer.frontier.step + 1

    @property
    def number_for_faults(self) -> int:
        """As fault plans count in a recovery: 0 while the job, or this process, has not begun."""
        return 0 if self.committer.fresh else self.number

    def begin(self) -> None:
        """A batch is about to be taken: what changes from now on belongs to the step."""
        if self.stepping:
            self.committer.begin()

    def begin_by_hand(self) -> None:
        """The same for scripts that commit themselves: their step is open from one commit to the next."""
        if not self.stepping:
            self.committer.begin()

    def admit_update(self) -> bool:
        """Whether the optimizer may apply its update now; see ``Committer.admit_update``."""
        return not self.stepping or self.committer.admit_update()

    def update_applied(self, group: Group) -> None:
        """The optimizer has applied an update that was admitted."""
        if self.stepping:
            self.committer.update_applied(group.generation)
            self._losses.update_applied(self.number)

    def commit(self, group: Group) -> None:
        """Make the step final. Whoever wants to know of commits is told here.

        Args:
            group: the present one.
        """
        computed_by = self.committer.computed_by
        self._ledger.committed(self.number, group.generation if computed_by is None else computed_by)
        self.committer.commit()
        self._copy_if_due()
        self.shared_by = group
        self._losses.step_ended()
        self._bus.position.step = self.committer.frontier.step
        gap_s = self._history.committed(self.committer.frontier.step)
        if gap_s is not None:
            self._bus.emit("resumed", gap_s=gap_s)

    def _copy_if_due(self) -> None:
        copies = self.trainee.ft_copies()
        if copies is not None and self.stepping:
            copies.committed(self.committer.frontier.step)

    def keep(self, group: Group) -> None:
        """A run has ended: another, or a durable checkpoint, goes on with what is open, not with the last explicit
        commit.
        """
        if not self.committer.open or self.stepping:
            return
        if self.trainee.open_ranges():
            self.commit(group)  # with its samples it is a step
        else:
            self.committer.save()
            self.committer.committed = self.committer.export()

    def carried_forward(self, reach: Reach, decision: Forward, done: Finished) -> list[int]:
        """The update that failed is complete without those who are gone.

        Returns:
            ids of the samples that do not count in a part of it.
        """
        if self.committer.computed_by is None:
            self.committer.computed_by = reach.shared_by.generation
        return self._losses.carried_forward(self.number, reach, decision, done)

    def give_up(self, agreement: Agreement) -> None:
        """Discard it, unless it was completed by others: then what it did to local state is right.

        Nor is anything given up once all training functions have returned, because nobody would do it again.
        """
        self.given_up = True
        self._ledger.discarded()
        self.trainee.discard()
        self._losses.step_ended()
        if agreement.reenter and self.committer.frontier.step >= agreement.frontier.step:
            self.committer.rollback()

    def settled(self, agreement: Agreement) -> None:
        """All workers have the state that the group goes on from."""
        if self.back_from is not None:  # a try that broke, too: some may have gone back in it
            self._ledger.went_back(agreement.frontier.step, agreement.generation)
            copies = self.trainee.ft_copies()
            if copies is not None:
                copies.forget_after(agreement.frontier.step)
            self._history.went_back(self.back_from)
        elif self.begins_at is not None:
            self._ledger.went_back(self.begins_at, agreement.generation)
        self.back_from = self.begins_at = None
        self.given_up = False
