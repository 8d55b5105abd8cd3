"""Telemetry: metrics for Prometheus, and events that entities write for the data pipeline."""
