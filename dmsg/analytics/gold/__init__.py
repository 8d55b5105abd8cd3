"""Computation of the gold tables. Each module has the tables for one group of questions, and each public function
computes one table from others."""
