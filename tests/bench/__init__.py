"""Benchmarks: run by `make bench`, never by `make test`; they add to RESULTS.md."""
