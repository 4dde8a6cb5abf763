"""Plans a deployment: from a model, a device, a load and objectives to a mesh. torch is loaded only in a child process."""
