"""What a deployment will take: from a model, a device, a load and objectives to a mesh. No torch but in a child process."""
