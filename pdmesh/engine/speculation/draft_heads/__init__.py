"""Draft heads: small networks on the hidden state of the model that they were trained for."""
