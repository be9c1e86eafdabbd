"""What the benchmarks run under horovodrun: one module a kind of job, plus what they share."""
