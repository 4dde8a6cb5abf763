"""The Open Inference Protocol v2 (KServe, Triton) over gRPC, in front of the mesh. The module `tensors` lists the tensors."""
