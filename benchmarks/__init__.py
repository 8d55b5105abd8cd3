"""Benchmarks: ``make bench``.  Figures are judged as ratios within one run."""
