"""Mutants that no test can notice, each with the reason."""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str], str] = {}
"""Reason by file, line as it is, and line as the mutant has it."""
