"""One command for each benchmark: ``python -m benchmarks.NAME`` from the repository's root."""
