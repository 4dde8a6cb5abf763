"""One step on the device: the batch, the model runner, overlap scheduling."""
