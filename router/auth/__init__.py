"""Authentication and tenants: API keys, the identity of a caller, limits of tenants."""
