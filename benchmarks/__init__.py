"""Benchmarks: one script a question, JSON results, stock Horovod measured in the same run."""
