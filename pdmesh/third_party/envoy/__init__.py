"""Stubs of what an endpoint picker needs of Envoy's external processing (package `envoy.service.ext_proc.v3`)."""
