"""The tests of mxsim, and beside them the oracle and the inputs that they share."""
