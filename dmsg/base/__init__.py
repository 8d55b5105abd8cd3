"""Basic building blocks without I/O, such as rate limits, tables, options and units, which any other package may
import."""
