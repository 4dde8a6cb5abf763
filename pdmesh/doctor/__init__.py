"""Checks of the machine and of what is installed, for `pdmesh doctor`; measurements of transports and engine steps."""
