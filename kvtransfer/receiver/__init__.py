"""The receiving side of a push: listening on every transport, checking the push token, writing and verifying parts."""
