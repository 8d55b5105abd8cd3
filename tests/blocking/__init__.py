"""Tests of dmsg.blocking."""
