"""Everything that a person or a program calls, and the packages beneath the services."""
