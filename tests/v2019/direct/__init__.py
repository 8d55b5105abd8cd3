"""Tests of direct links."""
