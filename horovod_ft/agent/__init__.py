"""Beside a job: the process that runs Horovod's launcher, and what starts it again. Imports no framework."""
