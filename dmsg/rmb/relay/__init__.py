"""The relay: what it decides of a message, and how it carries that out."""
