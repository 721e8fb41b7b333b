"""Theory: derivations whose results are the numbers used in tests and studies."""
