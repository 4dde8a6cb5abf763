"""Stubs of `pdmesh.v1`, generated from `protos/pdmesh/v1/` by `make stubs`."""
