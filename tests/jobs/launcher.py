"""``horovodrun``, without looking for what Horovod was built for: that imports TensorFlow and torch, 4 s a job."""

from importlib import import_module

if __name__ == "__main__":
    launch = import_module("horovod.runner.launch")
    vars(launch)["gloo_built"] = lambda verbose=False: True
    launch.run_commandline()
