"""Draft heads: small nets on the hidden state of the model that they were trained for."""
