"""Batches that one thread fetches before they are asked for. Which ones is decided in the thread that asks.

What was fetched for another group or another place is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from horovod_ft.data import Deal, Ids

Fetch = Callable[[Ids], Any]


class Ahead:
    """Fetches in order.

    Args:
        depth: so many batches are fetched ahead; 0: each is fetched when it is asked for, in the thread that asks.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._pool = ThreadPoolExecutor(1, "horovod_ft-data") if depth else None
        self._fetch: Fetch | None = None
        self._ordered: deque[tuple[Deal, Future[Any]]] = deque()

    def batch(self, deal: Deal, following: Callable[[Deal], Deal | None], fetch: Fetch) -> Any:
        """The batch of a deal. Blocks until it is there.

        Args:
            deal: that is to be trained on now.
            following: the deal after another one, as it would be for the present group; None at an epoch's end.
            fetch: gives the batch of some sample ids; runs in a thread of its own. What another one was ordered from
                is dropped.

        Raises:
            Exception: whatever fetching raises.
        """
        if self._pool is None:
            return fetch(deal.ids)
        if not (self._ordered and self._ordered[0][0].same_batch(deal) and fetch == self._fetch):
            self.drop()
            self._fetch = fetch
            self._order(self._pool, deal, fetch)
        self._fill(self._pool, following, fetch)
        try:
            return self._ordered.popleft()[1].result()
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Forget what was fetched ahead, and what is ordered."""
        while self._ordered:
            self._ordered.popleft()[1].cancel()

    def _fill(self, pool: ThreadPoolExecutor, following: Callable[[Deal], Deal | None], fetch: Fetch) -> None:
        while len(self._ordered) <= self._depth:
            deal = following(self._ordered[-1][0])
            if deal is None:
                return
            self._order(pool, deal, fetch)

    def _order(self, pool: ThreadPoolExecutor, deal: Deal, fetch: Fetch) -> None:
        self._ordered.append((deal, pool.submit(fetch, deal.ids)))
