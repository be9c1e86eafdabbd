"""Durable checkpoints: files that outlive the job. Knows no framework, calls no collectives; adapters build on it."""
