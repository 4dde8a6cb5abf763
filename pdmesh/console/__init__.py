"""The console: a page that shows a running mesh. It receives the mesh's traces by OTLP and asks its routers for the rest."""
