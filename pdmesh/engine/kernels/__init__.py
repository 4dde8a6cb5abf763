"""Native code of the engine, one package per kind of device. No network, and no Python headers: plain C functions."""
