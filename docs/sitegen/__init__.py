"""Builds the documentation's site: `PYTHONPATH=docs python -m sitegen`, which is `make docs`.

The pages in `docs/`, the changelog and the benchmarks' results stand beside pages that are generated from the package:
one for each method, the configuration, the command line, models, data sets, partitions, tasks, and the Python names.
All of them are written to `docs/_build/source`, from which Sphinx makes `docs/_build/html`.
"""
