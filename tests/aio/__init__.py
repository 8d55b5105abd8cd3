"""Tests of dmsg.aio."""
