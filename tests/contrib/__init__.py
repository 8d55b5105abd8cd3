"""Tests of the files in contrib/, with the programs that use these files."""
