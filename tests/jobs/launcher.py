"""``horovodrun`` for the job tests, with two of its own faults left out.

It looks for what Horovod was built for, which imports TensorFlow and torch: 4 s a job. And whenever it starts a
process, for its discovery script every second, Python's multiprocessing collects the processes that have ended. If a
worker ends in that very moment, another thread waits for it in vain and takes its status for None: a failure, after a
job that has succeeded. That happened once in some 600 jobs here.
"""

from importlib import import_module

if __name__ == "__main__":
    launch = import_module("horovod.runner.launch")
    vars(launch)["gloo_built"] = lambda verbose=False: True
    vars(import_module("multiprocessing.process"))["_cleanup"] = lambda: None
    launch.run_commandline()
