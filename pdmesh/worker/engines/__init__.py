"""The engines that a worker can have: the interface, our own engine, and the list of them. Nothing outside asks which it is."""
