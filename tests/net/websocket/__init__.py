"""Tests of websockets without I/O."""
