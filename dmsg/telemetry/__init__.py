"""Telemetry: metrics, and events that the entities write for the pipeline."""
