"""The figures that the policy decides from: what all routers report of traffic and workers. Mostly pure."""
