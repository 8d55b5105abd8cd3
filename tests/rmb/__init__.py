"""Tests of the reliable message bus."""
