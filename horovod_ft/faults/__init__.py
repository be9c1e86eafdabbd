"""Fault plans, and their injection into a real run."""
