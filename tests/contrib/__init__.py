"""What operators take from contrib/, tried with the programs that it is for."""
