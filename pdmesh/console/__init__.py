"""The console: a page that shows what a mesh does. It takes the mesh's traces by OTLP and asks its routers for the rest."""
