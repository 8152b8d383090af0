"""Benchmarks, run as modules from the project's root: `python -m benchmarks.bench_layer --help`.

A package, so that `import benchmarks` never means `tests/benchmarks`.
"""
