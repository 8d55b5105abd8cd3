"""Tests of peers on a network."""
