"""The command ``horovod-ft``: one file a command. Imports neither Horovod nor a framework into its own process."""
