"""Transformation from silver to gold: a module for each group of questions; functions from tables to a table."""
