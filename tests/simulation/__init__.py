"""The mesh in a simulated world: real code on a virtual clock, with a network, processes and faults that a seed chooses."""
