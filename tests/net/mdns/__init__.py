"""Tests of multicast DNS."""
