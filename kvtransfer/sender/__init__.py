"""The sending side of a push: cutting KV into parts, queueing them as layers become final, sending them over connections."""
