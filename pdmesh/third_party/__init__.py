"""Stubs of protocols that others define; their files stand in `protos/pdmesh/third_party/`."""
