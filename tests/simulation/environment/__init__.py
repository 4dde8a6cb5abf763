"""What surrounds the processes of a simulated world beside gRPC: sockets, a Redis, and the faults of machines."""
