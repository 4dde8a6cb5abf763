"""What `make stubs` makes of the proto files: stubs, the API reference, the list of the stable API."""
