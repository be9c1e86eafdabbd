"""``horovodrun``, except that it does not import TensorFlow to find out what Horovod was built for: 2 s less a job."""

import sys
from importlib import import_module

if __name__ == "__main__":
    sys.modules["tensorflow"] = None  # type: ignore[assignment]
    import_module("horovod.runner.launch").run_commandline()
