"""Help for testing training jobs: see ``local_job`` for real jobs on one machine."""
