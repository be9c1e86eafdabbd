"""``python -m horovod_ft.agent.launcher``: Horovod's own launcher, ``horovodrun``, with faults of its own mended.

The workers are started by processes which Horovod's launcher *spawns*: Python imports the main module anew in each. It
leaves a ``__main__.py`` of a package alone, so that none of them pays for what this one imports.
"""
