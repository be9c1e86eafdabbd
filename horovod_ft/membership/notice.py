"""How a notice that the job is about to be ended is told apart from a change of hosts. No Horovod import.

Horovod's launcher has one way to tell its workers something: ``notify_hosts_updated(timestamp, result)``, when hosts
come or go. A notice takes the same way, with values that Horovod never sends.
"""

from __future__ import annotations

#: The result. Horovod uses its two lowest bits: ``HostUpdateResult`` in ``runner/elastic/worker.py``.
PREEMPTED = 64
#: The timestamp. Horovod's own ``State.check_host_updates()`` heeds only what is later than 0, and so not this.
NO_TIME = 0
